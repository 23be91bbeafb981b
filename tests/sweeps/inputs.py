"""Odd inputs: values, files, tables and arrays that make no sense, or too much of it.

Each ends well, or in one line that names the value; a refused one leaves nothing behind. None ends in a traceback, and
none takes for ever: what is too large is refused before it is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

import fedblur
from fedblur.core.config import Config, LocalTraining
from fedblur.core.errors import FedBlurError
from fedblur.core.registry import KINDS, Kind, parts
from tests.sweeps.worlds import FILES, MACHINE, Outcome, invoke, write_files

LONG = "x" * 5000
BIG, HUGE = 2**53 + 1, 2**70  # beyond what floats and 64 bits hold
VALUES = (
    "0", "-1", "1", "2", "0.5", "-0.5", "1e-5", "1e-300", "1e-9", "1e9", "1e300", str(BIG), str(HUGE), str(-HUGE),
    "nan", "inf", "-inf", "true", "''", "'[/b]'", "'[red]'", "'‮é\\u0000'", f"'{LONG}'", "[]", "[[]]", "['']", "{}",
    "{name = 3}", "{name = '[/b]'}", "1979-05-27", "'nan'", "'1/N'", "\"a\\nb\"", "0x10", "[1, 2]", "'../x'",
)  # fmt: skip
SOME = (
    "0",
    "-1",
    "0.5",
    "1e-300",
    "1e300",
    str(BIG),
    str(HUGE),
    "nan",
    "inf",
    "true",
    "''",
    "'[/b]'",
    f"'{LONG}'",
    "[]",
    "{}",
)
_SLOW = ("mnist", "femnist", "emnist", "cifar10", "plays", "hub", "shakespeare")  # data sets that are not here
_BASES: dict[str, str] = {"clipping": "", "method": "", "sampling": "accountant = 'rdp'"}


@dataclass(frozen=True)
class Input:
    """One odd input: a command with its files, or a call of the library."""

    name: str
    words: tuple[str, ...] = ()  # W stands for the world's folder
    files: dict[str, bytes] = field(default_factory=dict, hash=False)
    names: str = ""  # what a refusal must contain
    call: Callable[[], object] | None = field(default=None, hash=False)
    group: str = ""


def inputs() -> list[Input]:
    """Return every odd input, in an order that does not change."""
    groups = {
        "settings": _settings(), "settings of parts": _parts(), "options and paths": _flags(),
        "TOML and JSON files": _tomls(), "tables": _tables(), "arrays": _arrays(),
    }  # fmt: skip
    return [dataclasses.replace(odd, group=group) for group, found in groups.items() for odd in found]


_RUN = ("run", "W/private.toml", "--out", "W/out/run", *MACHINE)


def _settings() -> Iterator[Input]:
    keys = [f.name for f in dataclasses.fields(Config)] + [f"local.{f.name}" for f in dataclasses.fields(LocalTraining)]
    for key in keys:
        for value in VALUES:
            shown = value if len(value) < 60 else f"{value[:20]}…"
            clash = ("--set", "noise_multiplier=inf") if key == "epsilon" else ()
            yield Input(
                f"run --set {key}={shown}",
                (*_RUN, *clash[:0], "--set", f"{key}={value}"),
                names={"metrics": "metric"}.get(key, key.split(".")[-1]),  # one of them may be named alone
            )
    for value in VALUES:  # a target instead of a noise level
        text = FILES["private.toml"].replace("noise_multiplier = 1.0", f"epsilon = {value}")
        yield Input(f"epsilon = {value[:40]} in a file", _RUN, {"private.toml": text.encode()}, "epsilon")


def _parts() -> Iterator[Input]:
    """Odd settings of every part."""
    for kind in KINDS:
        chosen: Kind = kind  # type: ignore[assignment]
        key = "method" if kind == "voting" else kind
        for name, part in sorted(parts(chosen).items()):
            if name in _SLOW or not part.__module__.startswith("fedblur."):
                continue
            for setting in dataclasses.fields(part):  # type: ignore[arg-type]
                for value in SOME:
                    table = f"{{ name = '{name}', {setting.name} = {value} }}"
                    more = ("--set", "accountant='rdp'") if kind in ("mechanism", "sampling") else ()
                    words = (
                        *_RUN,
                        "--set",
                        f"{key}={table if kind not in ('method', 'voting') else f'[{table}]'}",
                        *more,
                    )
                    yield Input(f"run --set {kind}.{name}.{setting.name}={value[:40]}", words, names="")


def _flags() -> Iterator[Input]:
    numbers = ("0", "-1", "nan", "inf", "-inf", "1e-300", "1e300", str(HUGE), "", "x", "[/b]", "0.5", "1e9")
    plan = ("plan", "--clients", "1000", "--sample-rate", "0.1", "--rounds", "10", "--epsilon", "2")
    for flag in (
        "--clients",
        "--sample-rate",
        "--rounds",
        "--epsilon",
        "--delta",
        "--parameters",
        "--clip-norm",
        "--sampling",
        "--mechanism",
    ):
        for value in numbers:
            yield Input(f"plan {flag} {value}", (*plan, flag, value))
    for value in numbers:
        yield Input(f"plan --noise-multiplier {value}", (*plan[:-2], "--noise-multiplier", value))
        for flag in ("--epsilon", "--delta", "--rounds", "--sample-rate", "--clients", "--seed", "--rank-timeout"):
            yield Input(f"run {flag} {value}", (*_RUN, flag, value))
        for flag in ("--dataset", "--model", "--method", "--recipe", "--engine", "--device", "--precision", "--logger"):
            yield Input(
                f"run {flag} {value!r}", ("run", "W/private.toml", "--out", "W/out/run", "--quiet", flag, value)
            )
        yield Input(
            f"table --max-minutes {value}",
            ("table", "W/table.toml", "--out", "W/out/t", *MACHINE, "--max-minutes", value),
        )
        for flag in ("--trials", "--eta", "--epsilon", "--score", "--proxy", "--proxy-set"):
            yield Input(
                f"tune {flag} {value}", ("tune", "W/grid.toml", "--out", "W/out/t", "--dry-run", *MACHINE, flag, value)
            )
        for flag in ("--canaries", "--held-out", "--repetitions"):
            worst = ("--worst-case",) if flag == "--repetitions" and value in ("0", "-1") else ()
            if flag != "--repetitions" or value not in ("1e9",):
                yield Input(
                    f"audit {flag} {value}",
                    ("audit", "W/private.toml", "--out", "W/out/a", *MACHINE, *worst, flag, value),
                )
        yield Input(f"ledger show --delta {value}", ("ledger", "show", "W/out", "--delta", value))
    places = (
        "",
        ".",
        "W",
        "W/private.toml",
        "W/private.toml/x",
        "/dev/null",
        "/dev/null/x",
        f"W/{LONG}",
        "W/[/b]",
        "W/none",
        "-",
        "/proc/1/x",
        "W/a\nb",
    )
    for place in places:
        for words in (
            ("resume",),
            ("statement",),
            ("report",),
            ("results",),
            ("ledger", "show"),
            ("ledger", "verify"),
            ("audit",),
            ("run",),
            ("table",),
            ("tune",),
        ):
            yield Input(f"{' '.join(words)} {place[:40]!r}", (*words, place))
        yield Input(f"run --out {place[:40]!r}", ("run", "W/private.toml", "--out", place, *MACHINE))
        yield Input(f"table --out {place[:40]!r}", ("table", "W/table.toml", "--out", place, *MACHINE))
        yield Input(f"plugin {place[:40]!r}", (*_RUN, "--plugin", place))
    for text in (
        "",
        "=",
        "=1",
        "x",
        "x=",
        ".=1",
        "a.b.c=1",
        "local=1",
        "local.=1",
        "local.steps.x=1",
        "method.=1",
        "method.blur=1",
        "model.=",
        "model.x.y=1",
        "[/b]=1",
        f"{LONG}=1",
        f"rounds={'[' * 5000}",
        f"rounds={'{a=' * 5000}",
        "rounds=1\nx=2",
        "seed=1;",
        "dataset.clients=1",
        "a" + ".a" * 2000 + "=1",
    ):
        yield Input(f"run --set {text[:40]!r}", (*_RUN, "--set", text))
        yield Input(
            f"table --set {text[:40]!r}", ("table", "W/table.toml", "--out", "W/out/t", *MACHINE, "--set", text)
        )
    for pattern in ("", "[", "[/b]", "*" * 100, LONG, "\\"):
        yield Input(
            f"table --only {pattern[:40]!r}", ("table", "W/table.toml", "--out", "W/out/t", *MACHINE, "--only", pattern)
        )


_TOMLS: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "not UTF-8": b'dataset = "\xff"',
    "byte order mark": b"\xef\xbb\xbfrounds = 1",
    "deep arrays": b"rounds = " + b"[" * 20_000,
    "deep whole arrays": b"rounds = " + b"[" * 20_000 + b"]" * 20_000,
    "deep tables": b"x = " + b"{a = " * 5_000 + b"1" + b"}" * 5_000,
    "deep keys": b"a" + b".a" * 5_000 + b" = 1",
    "deep headers": b"[a" + b".a" * 5_000 + b"]\nb = 1",
    "long key": b"k" * 100_000 + b" = 1",
    "long text": b'dataset = "' + b"x" * 1_000_000 + b'"',
    "many digits": b"rounds = " + b"9" * 10_000,
    "markup": b'"[/b]" = 1',
    "markup in a name": b'dataset = "[/red]"',
    "twice": b"rounds = 1\nrounds = 2",
    "a date": b"rounds = 1979-05-27T07:32:00Z",
    "JSON": b'{"rounds": 1}',
    "nul": b"rounds = 1\x00",
    "right to left": 'dataset = "‮synthetic"'.encode(),
    "plugins": b"plugins = 3",
    "plugins of none": b'plugins = [""]',
    "plugins above": b'plugins = ["/dev/null"]',
    "only a comment": b"# x",
    "array of tables": b"[[rounds]]\nx = 1",
    "method of numbers": b"method = [1, 2]",
    "method of lists": b"method = [[]]",
    "method of itself": b'method = ["blur", "blur"]',
    "a part without a name": b"model = { hidden = 3 }",
    "own": b'own = { data = "x" }',
    "newline in a name": b'model = "a\\nb"',
}  # fmt: skip


_SHORT = {
    "table": ("--set", "rounds=1"),
    "run": ("--dataset", "synthetic", "--clients", "3"),
    "tune": ("--dry-run",),
    "audit": ("--canaries", "1"),
}


def _tomls() -> Iterator[Input]:
    for name, content in _TOMLS.items():
        for words in (("run",), ("table",), ("tune",), ("audit",)):
            yield Input(
                f"{words[0]}: TOML, {name}",
                (*words, "W/odd.toml", "--out", "W/out/x", *MACHINE, *_SHORT.get(words[0], ())),
                {"odd.toml": content + (b"" if words[0] != "run" or name == "binary" else b"\n")},
            )
        yield Input(
            f"run: JSON, {name}",
            ("run", "W/odd.json", "--out", "W/out/x", *MACHINE, *_SHORT["run"]),
            {"odd.json": content},
        )
    for name, content in {
        "deep": b'{"a":' * 50_000,
        "deep lists": b"[" * 100_000,
        "number": b"3",
        "list": b"[]",
        "NaN": b'{"rounds": NaN}',
        "a key twice": b'{"rounds": 1, "rounds": 2}',
        "no mechanism": b'{"mechanism": null}',
        "no methods": b'{"method": null}',
        "no metrics": b'{"metrics": null}',
        "no data set": b'{"dataset": null}',
        "nothing at all": b'{"local": null, "server": null, "model": null, "sampling": null, "task": null}',
        "digits": b'{"rounds": ' + b"9" * 10_000 + b"}",
    }.items():
        yield Input(
            f"run: JSON, {name}",
            ("run", "W/odd.json", "--out", "W/out/x", *MACHINE, *_SHORT["run"]),
            {"odd.json": content},
        )


_BASE = FILES["table.toml"].split("[axes]")[0]
_TABLES: dict[str, str] = {
    "no base": "[axes]\nseed = [1]",
    "base is a number": "base = 3",
    "axes is a list": "axes = [1]",
    "axes of nothing": "[axes]\nseed = []",
    "axes of a number": "[axes]\nseed = 3",
    "axes of texts": '[axes]\nseed = ["a"]',
    "axes of lists": "[axes]\nseed = [[1], [2]]",
    "axes of tables": "[axes]\nmodel = [{ name = 'logistic' }]",
    "axes of markup": "[axes]\nmodel = ['[/b]']",
    "axes of NaN": "[axes]\nepsilon = [nan, nan]",
    "axes of infinity": "[axes]\nclip_norm = [inf, -inf]",
    "an unknown axis": "[axes]\n'[/b]' = [1]",
    "an axis with dots": "[axes]\n'a.b.c.d' = [1]",
    "an axis of a part": "[axes]\n'server.momentum' = [0.5, 'x']",
    "an axis of no key": "[axes]\n'' = [1]",
    "an axis with an equals sign": "[axes]\n'local.steps=3' = [1]",
    "axes without end": "[axes]\n" + "\n".join(f"'local.x{i}' = {list(range(100))}" for i in range(10)),
    "very many cells": f"[axes]\nseed = {[*range(1000)]}\ndata_seed = {[*range(1000)]}\nrounds = {[*range(1, 1000)]}",
    "values twice": "[axes]\nseed = [1, 1]",
    "rows is a number": "rows = 3",
    "rows is a text": "rows = 'x'",
    "rows of numbers": "rows = [1]",
    "rows of nothing": "rows = []",
    "a row without a label": "[[rows]]\nrounds = 1",
    "a label that is a number": "[[rows]]\nlabel = 3",
    "an empty label": "[[rows]]\nlabel = ''",
    "markup in a label": "[[rows]]\nlabel = '[/b]'",
    "a link in a label": "[[rows]]\nlabel = '[link=file:///x]y'",
    "a long label": f"[[rows]]\nlabel = '{LONG}'",
    "a label of lines": '[[rows]]\nlabel = "a\\nb\\u001b[31m"',
    "a label from right to left": "[[rows]]\nlabel = '‮x'",
    "labels twice": "[[rows]]\nlabel = 'a'\n[[rows]]\nlabel = 'a'\nrounds = 1",
    "a use that is a text": "[[rows]]\nlabel = 'a'\nuse = 'x'",
    "a use of a number": "[[rows]]\nlabel = 'a'\nuse = [3]",
    "a use of a list": "[[rows]]\nlabel = 'a'\nuse = [[3]]",
    "a use of nothing": "[[rows]]\nlabel = 'a'\nuse = ['x']",
    "shared is a number": "shared = 3",
    "shared of a number": "[shared]\nx = 3",
    "a priority that is a text": "[[rows]]\nlabel = 'a'\npriority = 'x'",
    "a priority that is true": "[[rows]]\nlabel = 'a'\npriority = true",
    "axes of a row": "[[rows]]\nlabel = 'a'\naxes = 3",
    "expected of nobody": "[expected]\n'x' = 3",
    "expected of a text": "[[rows]]\nlabel = 'a'\n[expected]\n'a' = 'x'",
    "expected of NaN": "[[rows]]\nlabel = 'a'\n[expected]\n'a' = nan",
    "expected of a list": "[[rows]]\nlabel = 'a'\n[expected]\n'a' = [1]",
    "a title that is a number": "title = 3",
    "a title of markup": "title = '[/b]'",
    "a note that is a list": "note = [1]",
    "a note of markup": "note = '[/b]'",
    "tuning is a number": "tuning = 3",
    "tuning of markup": "tuning = '[/b]'",
    "results is a number": "results = 3",
    "results is a file": "results = 'private.toml'",
    "results is nothing": "results = ''",
    "results with a nul": 'results = "a\\u0000b"',
    "results of a long name": f"results = '{LONG}'",
    "an unknown section": "'[/b]' = 3",
    "a setting at the top": "rounds = 3",
}  # fmt: skip


def _tables() -> Iterator[Input]:
    for name, text in _TABLES.items():
        own, top = name, []
        lines = text.split("\n")
        while lines and not lines[0].startswith("["):  # keys of the whole file come before [base]
            top.append(lines.pop(0))
        base = "" if "base" in name else _BASE
        content = "\n".join([*top, base, *lines]) + "\n"
        for words in (
            ("table", "W/odd.toml", "--out", "W/out/t", *MACHINE),
            ("tune", "W/odd.toml", "--dry-run", *MACHINE),
            ("table", "W/odd.toml", "--dry-run"),
        ):
            short = "" if "--dry-run" not in words else " --dry-run"
            yield Input(f"{words[0]}{short}: {own}", words, {"odd.toml": content.encode()})


def _arrays() -> Iterator[Input]:
    """Odd arguments of `federation_from_arrays`, one at a time."""
    rng = np.random.default_rng(0)
    good: dict[str, Any] = {
        "x": rng.normal(size=(12, 3)), "y": np.arange(12) % 2, "owners": np.arange(12) % 4,
        "test_x": rng.normal(size=(4, 3)), "test_y": np.arange(4) % 2,
    }  # fmt: skip
    odd: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "a text": lambda: "[/b]",
        "a number": lambda: 3,
        "NaN": lambda: np.nan,
        "nothing": lambda: [],
        "empty": lambda: np.empty((0, 3)),
        "objects": lambda: np.array([object()] * 12, dtype=object),
        "objects of numbers": lambda: np.array([[1, 2, 3]] * 12, dtype=object),
        "texts": lambda: np.array(["a"] * 12),
        "ragged": lambda: [[1, 2], [3]] * 6,
        "NaNs": lambda: np.full((12, 3), np.nan),
        "infinite": lambda: np.full((12, 3), np.inf),
        "huge floats": lambda: np.full((12, 3), 1e300),
        "huge numbers": lambda: np.full(12, 2**62),
        "huger numbers": lambda: [2**70] * 12,
        "negative": lambda: np.full(12, -5),
        "floats": lambda: np.linspace(0, 1, 12),
        "complex": lambda: np.full((12, 3), 1j),
        "booleans": lambda: np.full(12, True),
        "dates": lambda: np.full(12, np.datetime64("2020-01-01")),
        "unsigned": lambda: np.arange(12, dtype=np.uint64),
        "16 bits": lambda: np.arange(12, dtype=np.uint16),
        "records": lambda: np.zeros(12, dtype=[("a", "i4")]),
        "a scalar array": lambda: np.array(3),
        "five dimensions": lambda: np.zeros((12, 1, 1, 1, 3)),
        "no features": lambda: np.zeros((12, 0)),
        "a dictionary": lambda: {"a": 1},
        "a set": lambda: {1, 2},
        "a generator": lambda: (i for i in range(12)),
        "bytes": lambda: b"abc",
        "a sparse tensor": lambda: torch.eye(12).to_sparse(),
        "a meta tensor": lambda: torch.empty(12, 3, device="meta"),
        "a masked array": lambda: np.ma.masked_all(12),
        "reversed": lambda: np.arange(12)[::-1],
        "read only": lambda: np.broadcast_to(np.float64(1), (12, 3)),
        "one too few": lambda: np.zeros(11, dtype=int),
    }
    for argument in good:
        for name, make in odd.items():
            yield Input(
                f"federation_from_arrays({argument}={name})", call=_calling(good, argument, make), names=argument
            )
    further: dict[str, tuple[Any, ...]] = {
        "classes": (0, -1, 1, 2.5, "x", HUGE, 10**9, None, True, [2], float("nan")),
        "validation_share": (-1, 1, 2, "x", float("nan"), float("inf"), None, [0.1], True, 1e-300, 0.999999),
        "seed": (-1, HUGE, "x", 1.5, None, float("nan"), [1], True),
        "names": (
            [],
            ["a"],
            ["a"] * 4,
            "abcd",
            3,
            [None] * 4,
            [1, 2, 3, "3"],
            {"a": 1},
            ["[/b]", "", "‮", LONG],
            [float("nan")] * 4,
        ),
    }
    for argument, values in further.items():
        for value in values:
            yield Input(
                f"federation_from_arrays({argument}={str(value)[:40]!r})",
                call=_calling(good, argument, lambda value=value: value),
                names=argument,
            )


def _calling(good: dict[str, Any], argument: str, make: Callable[[], Any]) -> Callable[[], object]:
    return lambda: fedblur.federation_from_arrays(**{**good, argument: make()})


class Inputs:
    """The sweep of odd inputs in a scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self.world = scratch.resolve() / "world"

    def judge(self, odd: Input) -> tuple[str, str] | None:
        """Return what is wrong with how an input ends, as (kind, words), or None."""
        with _little_memory():
            return self._called(odd) if odd.call is not None else self._typed(odd)

    def _called(self, odd: Input) -> tuple[str, str] | None:
        assert odd.call is not None
        try:
            odd.call()
        except FedBlurError as error:
            return None if odd.names in str(error) and "\n" not in str(error) else ("unclear", str(error))
        except Exception as error:
            return "traceback", repr(error)
        return None

    def _typed(self, odd: Input) -> tuple[str, str] | None:
        shutil.rmtree(self.world, ignore_errors=True)
        write_files(self.world)
        for name, content in odd.files.items():
            (self.world / name).write_bytes(content)
        before = set(self.world.rglob("*"))
        with contextlib.chdir(self.world):
            outcome = invoke(
                [word.replace("W/", f"{self.world}/") if word != "W" else str(self.world) for word in odd.words]
            )
        if outcome.bug or outcome.status not in (0, 1, 2):
            return "traceback", outcome.bug or f"status {outcome.status}: {outcome.err}"
        if outcome.status != 2:
            return None
        if wrong := _unclear(outcome, odd):
            return "unclear", wrong
        left = sorted(str(path.relative_to(self.world)) for path in {*self.world.rglob("*")} - before)
        return ("leaves files", f"{left}: {outcome.err}") if left else None


def _unclear(outcome: Outcome, odd: Input) -> str:
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    if len(errors) != 1:
        return f"{len(errors)} lines: {outcome.err[:500]}"
    return "" if odd.names in errors[0] else f"{odd.names} is not named: {errors[0][:500]}"


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process take 8 GiB of addresses more than it has, where a system can limit them."""
    try:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + 8 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


assert get_args(Kind)
