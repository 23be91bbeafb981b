"""Forged run folders: what `ledger verify` finds on its own, with the operator's key, and with a seal.

Each forgery is made of a finished private run that was signed and sealed. The page docs/guides/reviewing-privacy.md
shows the same table.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedblur
from fedblur.core.config import config_digest, config_hash, from_dict
from fedblur.privacy.ledger import Chain
from fedblur.privacy.ledger_file import open_ledger
from fedblur.privacy.signature import FILE, check_seal, check_signature, make_key, seal, sign
from fedblur.training.checkpoint import load_newest, save_checkpoint
from fedblur.training.run_folder import RunFolder
from fedblur.training.verify_ledger import verify

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "reviewing-privacy.md"
SETTINGS = fedblur.Config(epsilon=4.0, rounds=4, sample_rate=0.2, clients=60, checkpoint_every=1, delta=0.01)


@dataclass(frozen=True)
class World:
    """A run that was signed and sealed, and what a forger may have at hand."""

    private: Path
    seeded: Path
    other: Path  # another private run of the same operator, signed too
    key: Path  # public
    signing_key: Path  # the operator's; only "the operator forges" uses it
    seals: dict[str, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("forgeries")
    key = path / "operator"
    public = make_key(key)
    settings = {
        "private": SETTINGS,
        "seeded": replace(SETTINGS, seed=1),
        "other": SETTINGS,
    }
    seals = {}
    for name, config in settings.items():
        if name == "private":
            keep_old_copy(config, path)
        else:
            fedblur.train(config, out=path / name)
        chain = open_ledger(path / name / "ledger.jsonl")
        sign(chain, key)
        seals[name] = seal(chain)
    return World(path / "private", path / "seeded", path / "other", public, key, seals)


def keep_old_copy(config: fedblur.Config, path: Path) -> None:
    """Train `private`, and copy the folder after its second round, as a backup does; the copy is signed, too."""

    def copy(row: Any) -> None:
        if row["round"] == 2:
            shutil.copytree(path / "private", path / "old", ignore=shutil.ignore_patterns(".lock"))

    fedblur.train(config, out=path / "private", watch=copy)
    sign(open_ledger(path / "old" / "ledger.jsonl"), path / "operator")


# --- what a forger does ---


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table, indent=2))


def rechain(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Write the whole chain anew after a change of its lines: anyone can, there is no secret in it."""
    path = run / "ledger.jsonl"
    bodies = [link.body for link in Chain(path).read()]
    change(bodies)
    path.unlink()
    chain = Chain(path)
    with chain.writing():
        for body in bodies:
            chain.append(body)


def fit_everything(run: Path) -> None:
    """Make summary, checkpoints and closing line fit the ledger and the files that are there now."""
    for name in ("statement.json", "statement.md", "statement.html"):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / "checkpoints")
    folder = RunFolder(run)
    chain = Chain(folder.ledger)
    spends = [link for link in chain.read() if link.body["kind"] != "close"]

    def anchor(summary: dict[str, Any]) -> None:
        summary["privacy"]["ledger"] = {"lines": len(spends), "head": spends[-1].hash}

    edit_json(folder.summary, anchor)
    rechain(run, lambda bodies: bodies[-1].update(released=folder.released()))


def keep_a_checkpoint(run: Path) -> None:
    """Bring a checkpoint along that remembers the forged ledger: verify wants one."""
    from fedblur.training.checkpoint import Checkpoint

    tensors = load_file(run / "model.safetensors")
    theta = torch.cat([tensor.flatten() for tensor in tensors.values()])
    head = next(link for link in reversed(Chain(run / "ledger.jsonl").read()) if link.body["kind"] != "close")
    lines = Chain(run / "ledger.jsonl").read().index(head) + 1
    state = {"config": json.loads((run / "config.json").read_text()), "ledger": {"lines": lines, "head": head.hash}}
    save_checkpoint(run / "checkpoints", Checkpoint(4, {"theta": theta}, state))


def more_noise(bodies: list[dict[str, Any]]) -> None:
    """Claim three times the noise that was drawn."""
    for body in bodies:
        if body["kind"] == "spend":
            body["event"]["inner"]["noise_multiplier"] *= 3
    subject = bodies[0]["subject"]
    subject["event"]["inner"]["noise_multiplier"] *= 3
    subject["noise_multiplier"] *= 3


def swap_model(run: Path) -> None:
    tensors = load_file(run / "model.safetensors")
    metadata = {"fedblur": json.dumps({"round": 4})}
    save_file({name: torch.randn_like(tensor) for name, tensor in tensors.items()}, run / "model.safetensors", metadata)


def new_owner(run: Path, **changed: Any) -> None:
    """Change config.json, and what the ledger's first line says of it."""
    edit_json(run / "config.json", lambda table: table.update(changed))
    config = from_dict(json.loads((run / "config.json").read_text()))

    def own(bodies: list[dict[str, Any]]) -> None:
        bodies[0]["about"] = config_hash(config)
        bodies[0]["subject"]["config"] = config_digest(config)

    rechain(run, own)


def claim(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda summary: summary["privacy"].update(changed)


def edited_spend(run: Path, world: World) -> None:
    path = run / "ledger.jsonl"
    path.write_text(path.read_text().replace('"noise_multiplier": ', '"noise_multiplier": 9', 3))


def dropped_spend(run: Path, world: World) -> None:
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:2] + lines[3:]))


def cut_closing_line(run: Path, world: World) -> None:
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))


def edited_epsilon(run: Path, world: World) -> None:
    edit_json(run / "summary.json", claim(epsilon=0.788))


def edited_accuracy(run: Path, world: World) -> None:
    edit_json(run / "summary.json", lambda summary: summary.update(accuracy=0.99))


def edited_clients(run: Path, world: World) -> None:
    edit_json(run / "summary.json", lambda summary: summary.update(clients=100_000))


def edited_rounds(run: Path, world: World) -> None:
    path = run / "rounds.jsonl"
    rows = [json.loads(line) | {"accuracy": 0.99} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edited_configuration(run: Path, world: World) -> None:
    edit_json(run / "config.json", lambda table: table.update(epsilon=0.788))


def other_model(run: Path, world: World) -> None:
    swap_model(run)


def seeded_without_warning(run: Path, world: World) -> None:
    edit_json(run / "summary.json", claim(warning=None))


def seeded_without_its_seed(run: Path, world: World) -> None:
    edit_json(run / "config.json", lambda table: table.update(seed=None))
    edit_json(run / "summary.json", claim(warning=None))


def rechained_noise(run: Path, world: World) -> None:
    """The twenty lines of the attack: ε = 4 became a verified 0.788 although config.json says 4."""
    rechain(run, more_noise)
    sigma = 3 * json.loads((run / "summary.json").read_text())["privacy"]["noise_multiplier"]
    edit_json(run / "summary.json", claim(epsilon=_epsilon(run), noise_multiplier=sigma))
    fit_everything(run)
    keep_a_checkpoint(run)


def rechained_budget(run: Path, world: World) -> None:
    rechain(run, lambda bodies: bodies[0].update(epsilon="400.0"))
    fit_everything(run)
    keep_a_checkpoint(run)


def rechained_unit(run: Path, world: World) -> None:
    rechain(run, lambda bodies: bodies[0]["subject"].update(unit="everything that a whole city contributed"))
    fit_everything(run)
    keep_a_checkpoint(run)


def rechained_randomness(run: Path, world: World) -> None:
    """A seeded run whose ledger is written anew as one of secret noise; config.json still has the seed."""
    rechain(run, lambda bodies: bodies[0].update(randomness="operating system"))
    edit_json(run / "summary.json", claim(warning=None))
    fit_everything(run)
    keep_a_checkpoint(run)


def as_of_version_0_2(bodies: list[dict[str, Any]]) -> None:
    """Leave out what version 0.2 did not write: the plan and the closing line."""
    del bodies[0]["subject"]
    del bodies[-1]


def downgraded_noise(run: Path, world: World) -> None:
    """More noise claimed, in a ledger that looks like one of version 0.2."""
    rechained_noise(run, world)
    downgrade(run)


def downgraded_model(run: Path, world: World) -> None:
    """Another model, beside a ledger that looks like one of version 0.2 and is bound to none."""
    swap_model(run)
    downgrade(run)


def downgrade(run: Path) -> None:
    rechain(run, as_of_version_0_2)
    for name in ("statement.json", "statement.md", "statement.html"):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / "checkpoints")
    links = Chain(run / "ledger.jsonl").read()
    edit_json(run / "summary.json", claim(ledger={"lines": len(links), "head": links[-1].hash}))
    keep_a_checkpoint(run)


def second_closing_line(run: Path, world: World) -> None:
    """Another model, and a closing line for it behind the true one."""
    swap_model(run)
    released = RunFolder(run).released()
    rechain(run, lambda bodies: bodies.append({**bodies[-1], "released": released}))


def all_rechained_noise(run: Path, world: World) -> None:
    """As before, and config.json says the same: a run that nobody ever ran."""
    sigma = 3 * json.loads((run / "summary.json").read_text())["privacy"]["noise_multiplier"]
    new_owner(run, epsilon=None, noise_multiplier=sigma)
    rechain(run, more_noise)
    rechain(run, lambda bodies: bodies[0].update(epsilon=str(_epsilon(run))))
    edit_json(run / "summary.json", claim(epsilon=_epsilon(run), noise_multiplier=sigma))
    fit_everything(run)
    keep_a_checkpoint(run)


def _epsilon(run: Path) -> float:
    from fedblur.training.verify_ledger import read_books

    found = read_books(run).epsilon("pld")
    assert found is not None
    return found


def all_rechained_seed(run: Path, world: World) -> None:
    """A seeded run of which every file says that its noise was secret."""
    new_owner(run, seed=None)
    rechain(run, lambda bodies: bodies[0].update(randomness="operating system"))
    edit_json(run / "summary.json", claim(warning=None))
    fit_everything(run)
    keep_a_checkpoint(run)


def all_rechained_model(run: Path, world: World) -> None:
    swap_model(run)
    fit_everything(run)
    keep_a_checkpoint(run)


def all_rechained_accuracy(run: Path, world: World) -> None:
    edited_accuracy(run, world)
    fit_everything(run)
    keep_a_checkpoint(run)


def rolled_back(run: Path, world: World) -> None:
    """An old copy of the folder in its place: two rounds are forgotten, and could be released again."""
    signature = (run / FILE).read_bytes()
    shutil.rmtree(run)
    shutil.copytree(world.private.with_name("old"), run)
    (run / FILE).write_bytes(signature)


def rolled_back_with_its_signature(run: Path, world: World) -> None:
    shutil.rmtree(run)
    shutil.copytree(world.private.with_name("old"), run)


def other_run(run: Path, world: World) -> None:
    """Another run of the same operator in its place."""
    shutil.rmtree(run)
    shutil.copytree(world.other, run)


def operator_forges(run: Path, world: World) -> None:
    """The operator rewrites everything, and signs it."""
    all_rechained_noise(run, world)
    sign(open_ledger(run / "ledger.jsonl"), world.signing_key)


def edited_statement(run: Path, world: World) -> None:
    edit_json(run / "statement.json", lambda table: table["epsilon"].update(pld=0.788))


def other_statement(run: Path, world: World) -> None:
    shutil.copy(world.other / "statement.json", run)


def other_rounds(run: Path, world: World) -> None:
    shutil.copy(world.other / "rounds.jsonl", run)


def other_ledger(run: Path, world: World) -> None:
    shutil.copy(world.other / "ledger.jsonl", run)


def added_line(run: Path, world: World) -> None:
    """A line that we read as damaged, and other programs as a round."""
    with (run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "accuracy": 0.5, "accuracy": 0.99}\n')


def write_first(path: Path, pair: str) -> None:
    """Write a pair at the beginning of a JSON object: what a person reads first."""
    path.write_text(path.read_text().replace("{", "{" + pair + ", ", 1))


def key_twice_in_the_configuration(run: Path, world: World) -> None:
    write_first(run / "config.json", '"epsilon": 0.788')


def key_twice_in_the_summary(run: Path, world: World) -> None:
    write_first(run / "summary.json", '"accuracy": 0.99')


def key_that_looks_alike(run: Path, world: World) -> None:
    write_first(run / "summary.json", '"\u0430ccuracy": 0.99')  # Cyrillic


def other_population(run: Path, world: World) -> None:
    edit_json(run / "config.json", lambda table: table.update(population="of nobody"))


def other_start(run: Path, world: World) -> None:
    """The note that the statement makes of starting weights which the caller gave."""
    edit_json(run / "config.json", lambda table: table.update(own={"model": "PublicWeights"}))


def later_checkpoint(run: Path, world: World) -> None:
    found, _ = load_newest(run / "checkpoints")
    save_checkpoint(run / "checkpoints", replace(found, round=5))


def rechained_without_rounds(run: Path, world: World) -> None:
    """Three of four releases are left out, and nothing shows the rounds in which they were made."""
    rechain(run, lambda bodies: bodies.__delitem__(slice(1, 4)))
    rounds = run / "rounds.jsonl"
    rounds.write_text(rounds.read_text().splitlines(keepends=True)[-1])
    edit_json(run / "summary.json", claim(releases=1, epsilon=_epsilon(run)))
    fit_everything(run)
    keep_a_checkpoint(run)


def rechained_source(run: Path, world: World) -> None:
    rechain(run, lambda bodies: bodies[0].pop("randomness"))
    fit_everything(run)
    keep_a_checkpoint(run)


def all_rechained_trust(run: Path, world: World) -> None:
    edit_json(run / "summary.json", claim(trust_model="nobody sees anything"))
    fit_everything(run)
    keep_a_checkpoint(run)


def signature_of_another_run(run: Path, world: World) -> None:
    all_rechained_model(run, world)
    shutil.copy(world.other / FILE, run)


BY_VERIFY, BY_KEY, BY_SEAL = "verify", "--key", "--seal"
# Each forgery: what is done, of which run, in words, and who is the first to find it.
FORGERIES: list[tuple[Callable[[Path, World], None], str, str, str]] = [
    (edited_spend, "private", "a release edited", BY_VERIFY),
    (dropped_spend, "private", "a release removed", BY_VERIFY),
    (cut_closing_line, "private", "the closing line cut off", BY_VERIFY),
    (edited_epsilon, "private", "ε edited in the summary", BY_VERIFY),
    (edited_accuracy, "private", "accuracy edited in the summary", BY_VERIFY),
    (edited_clients, "private", "N edited in the summary", BY_VERIFY),
    (edited_rounds, "private", "accuracies edited in the rounds", BY_VERIFY),
    (edited_configuration, "private", "ε edited in the configuration", BY_VERIFY),
    (other_population, "private", "another population in the configuration", BY_VERIFY),
    (other_start, "private", "other starting weights named in the configuration", BY_VERIFY),
    (key_twice_in_the_configuration, "private", "a second ε in the configuration", BY_VERIFY),
    (key_twice_in_the_summary, "private", "a second accuracy in the summary", BY_VERIFY),
    (key_that_looks_alike, "private", "a key of the summary in letters that look alike", BY_VERIFY),
    (edited_statement, "private", "ε edited in statement.json", BY_VERIFY),
    (other_statement, "private", "the statement.json of another run", BY_VERIFY),
    (other_rounds, "private", "the rounds of another run", BY_VERIFY),
    (added_line, "private", "a line added to the rounds", BY_VERIFY),
    (other_ledger, "private", "the ledger of another run of the same settings", BY_VERIFY),
    (later_checkpoint, "private", "a checkpoint of a later round", BY_VERIFY),
    (other_model, "private", "another model put in place", BY_VERIFY),
    (seeded_without_warning, "seeded", "a seeded run without its warning", BY_VERIFY),
    (seeded_without_its_seed, "seeded", "a seeded run without warning and seed", BY_VERIFY),
    (rechained_noise, "private", "more noise claimed, the chain rewritten", BY_VERIFY),
    (rechained_budget, "private", "a larger budget, the chain rewritten", BY_VERIFY),
    (rechained_unit, "private", "another unit, the chain rewritten", BY_VERIFY),
    (rechained_randomness, "seeded", "a seeded run called private, the chain rewritten", BY_VERIFY),
    (rechained_without_rounds, "private", "releases and their rounds removed, the chain rewritten", BY_VERIFY),
    (rechained_source, "private", "the source of the noise left out, the chain rewritten", BY_VERIFY),
    (second_closing_line, "private", "another model, with a second closing line", BY_VERIFY),
    (downgraded_noise, "private", "more noise claimed, the plan left out as in version 0.2", BY_VERIFY),
    (downgraded_model, "private", "another model, the plan left out as in version 0.2", BY_KEY),
    (all_rechained_noise, "private", "more noise claimed in every file", BY_KEY),
    (all_rechained_seed, "seeded", "a seeded run called private in every file", BY_KEY),
    (all_rechained_model, "private", "another model, with the chain rewritten", BY_KEY),
    (all_rechained_accuracy, "private", "another accuracy, with the chain rewritten", BY_KEY),
    (all_rechained_trust, "private", "another trust model, with the chain rewritten", BY_KEY),
    (signature_of_another_run, "private", "another model, with the signature of another run", BY_KEY),
    (rolled_back, "private", "an older copy of the folder", BY_KEY),
    (rolled_back_with_its_signature, "private", "an older copy, with the signature of then", BY_SEAL),
    (other_run, "private", "another run of the same operator", BY_SEAL),
    (operator_forges, "private", "more noise claimed in every file, by the operator", BY_SEAL),
]


@pytest.mark.parametrize(("forge", "which", "words", "first"), FORGERIES, ids=[each[0].__name__ for each in FORGERIES])
def test_forgery__is_found_at_the_level_that_the_page_names(
    world: World, tmp_path: Path, forge: Callable[[Path, World], None], which: str, words: str, first: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(getattr(world, which), run)
    forge(run, world)
    found = {BY_VERIFY: verify(run)}
    if not found[BY_VERIFY]:
        chain = open_ledger(run / "ledger.jsonl")
        found[BY_KEY] = check_signature(chain, world.key)
        found[BY_SEAL] = check_seal(chain, world.seals[which])
        assert found[BY_SEAL]
    assert next(level for level, findings in found.items() if findings) == first
    assert f"| {words} | {first} |" in PAGE.read_text(encoding="utf-8")


def test_forgery__nothing_is_found_where_nothing_was_forged(world: World) -> None:
    for which in ("private", "seeded", "other"):
        run = getattr(world, which)
        assert verify(run) == []
        chain = open_ledger(run / "ledger.jsonl")
        assert check_signature(chain, world.key) == []
        assert check_seal(chain, world.seals[which]) == []


def test_page__lists_each_forgery_once() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| forgery | detected by |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| (.+?) \| (verify|--key|--seal) \|$", table, re.MULTILINE)) == sorted(
        (words, first) for _, _, words, first in FORGERIES
    )


ODD: list[tuple[str, Callable[[list[dict[str, Any]]], None]]] = [
    ("δ is a text", lambda bodies: bodies[0].update(delta="0.01")),
    ("δ is missing", lambda bodies: bodies[0].update(delta=None)),
    ("the accountant is a list", lambda bodies: bodies[0].update(accountant=[])),
    ("the source of noise is an object", lambda bodies: bodies[0].update(randomness={})),
    ("N is a text", lambda bodies: bodies[0]["subject"].update(clients="60")),
    ("the subject has another field", lambda bodies: bodies[0]["subject"].update(trust="all")),
    ("a round is a text", lambda bodies: bodies[1].update(round="1")),
    ("the noise is beyond all measure", lambda bodies: bodies[1]["event"]["inner"].update(noise_multiplier=1e308)),
    ("a closing line holds nothing", lambda bodies: bodies.insert(-1, {"kind": "close"})),
    ("two first lines", lambda bodies: bodies.insert(1, {"kind": "else"})),
]


@pytest.mark.parametrize("change", [change for _, change in ODD], ids=[words for words, _ in ODD])
def test_verify__a_rewritten_ledger_of_odd_values_is_a_finding(
    world: World, tmp_path: Path, change: Callable[[list[dict[str, Any]]], None]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(world.private, run)
    rechain(run, change)
    assert verify(run)


def test_resume__of_a_complete_run_keeps_the_model_whatever_its_checkpoint_holds(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(world.private, run)
    model = (run / "model.safetensors").read_bytes()
    found, _ = load_newest(run / "checkpoints")
    found.tensors["theta"].fill_(1.0)
    save_checkpoint(run / "checkpoints", found)
    fedblur.resume(run)
    assert (run / "model.safetensors").read_bytes() == model
    assert verify(run) == []


def test_statement__does_not_believe_a_summary_without_its_warning(world: World, tmp_path: Path) -> None:
    """The attack stated a seeded run as private, with forged N: it wrote null into the summary."""
    from fedblur.report.statement import read_statement

    run = tmp_path / "run"
    shutil.copytree(world.seeded, run)
    edited_clients(run, world)
    seeded_without_warning(run, world)
    statement = read_statement(run)
    assert "NOT PRIVATE" in statement.one_line()
    assert "LEDGER NOT VERIFIED" in statement.one_line()
    assert statement.facts()["clients"] == 60
    derived = RunFolder(run).read_summary()  # what reports and tables read
    assert derived is not None
    assert (derived.privacy.warning, derived.clients) == ("NOT PRIVATE: seeded", 60)
