"""The configuration of a run: one flat frozen dataclass. Its fields are the schema; unknown keys are errors.

A value that names a part (`model`, `method`, `server`, ...) is a name, or a table with a name and settings:
`model = "cnn"`, `model = { name = "cnn", variant = "a" }`, `method = ["blur", { name = "lus", sparsity = 0.5 }]`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedblur.core.decompression import read_at_most
from fedblur.core.errors import ConfigError, RunError, nearest
from fedblur.core.registry import check_types, convert_part, from_table, is_a, part, to_table

T = TypeVar("T")


def _explained(schema: type[T]) -> type[T]:
    """Let a misspelt field in Python be the error that it is in a file, with the nearest name."""
    make, known = schema.__init__, [f.name for f in fields(schema)]  # type: ignore[arg-type]

    @functools.wraps(make)
    def init(self: T, *values: Any, **named: Any) -> None:
        unknown = next((name for name in named if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"unknown key {unknown!r}: {nearest(unknown, known)}")
        make(self, *values, **named)

    schema.__init__ = init  # type: ignore[assignment]
    return schema


@_explained
@dataclass(frozen=True)
class LocalTraining:
    """Local training, what one client does with the model it receives: Q steps of SGD or Adam."""

    steps: int = 10  # Q: steps on each client and in each round
    batch_size: int = 32  # samples in each step
    learning_rate: float = 0.1  # η_l: of each step
    momentum: float = 0.0  # of SGD; 0: none
    weight_decay: float = 0.0  # pulls weights towards 0 in each step
    optimizer: Literal["sgd", "adam"] = "sgd"  # Adam starts fresh on each client and in each round
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam: what its two means keep of the past
    adam_epsilon: float = 1e-8  # of Adam: added to the root of the mean square

    def __post_init__(self) -> None:
        check_types(self, "local.")
        demand_between(1, 10**6, "local.steps", self.steps)
        demand_between(1, 10**6, "local.batch_size", self.batch_size)
        demand(0 < self.learning_rate < math.inf, "local.learning_rate", self.learning_rate, "must be above 0")
        demand(0 <= self.momentum < 1, "local.momentum", self.momentum, "must be in [0, 1)")
        demand(0 <= self.weight_decay < math.inf, "local.weight_decay", self.weight_decay, "must be 0 or more")
        demand(all(0 <= beta < 1 for beta in self.betas), "local.betas", list(self.betas), "must be two in [0, 1)")
        demand(0 < self.adam_epsilon < math.inf, "local.adam_epsilon", self.adam_epsilon, "must be above 0")
        if self.optimizer == "adam" and self.momentum:
            raise ConfigError(f"local.momentum={self.momentum} is of SGD; with Adam set local.betas instead")
        if self.optimizer == "sgd" and (self.betas, self.adam_epsilon) != ((0.9, 0.999), 1e-8):
            raise ConfigError('local.betas and local.adam_epsilon are of Adam; set local.optimizer = "adam"')


@_explained
@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result. Where it runs and where it is written is not in here."""

    # data
    dataset: Any = part("dataset", "digits")  # what is learned, and who owns which samples
    partition: Any = part("partition")  # None: the data set's own default
    clients: int | None = None  # N, training clients; None: the data set's own default
    validation_share: float = 0.1  # of all clients, about; they never train
    evaluate: Literal["test", "validation"] = "test"  # tune on "validation", report "test"
    population: str | None = None  # whose budget this run is charged to; None: public data, or a hash of client ids
    # task, model and method
    task: Any = part("task", "classification")  # what outputs and targets are, and each sample's loss
    metrics: Any = part("metric", (), many=True)  # what is measured, the headline first; (): the task's own
    model: Any = part("model", "logistic")  # the network that is trained
    method: Any = part("method", (), many=True)  # what clients do beyond DP-FedAvg, which is ()
    personal: tuple[str, ...] = ()  # patterns of parameters that stay on their client: never clipped, never sent
    personal_steps: int = 0  # of the personal part alone, on a client's own training samples, before it is evaluated
    local: LocalTraining = field(default_factory=LocalTraining)  # a client's training, keys below
    # privacy
    epsilon: float | None = None  # the target; inf: no noise; None: 2, or what noise_multiplier gives
    noise_multiplier: float | None = None  # σ given instead of epsilon
    delta: float | str = "1/N"  # a number, "1/N" or "N^-1.1"
    accountant: Literal["pld", "rdp"] = "pld"  # how ε is computed: privacy loss distributions, or Rényi (looser)
    clip_norm: float = 0.1  # S: the largest ℓ2 norm of a client's update
    bounding: Literal["clip", "normalise"] = "clip"  # to at most S, or to S exactly
    clipping: Any = part("clipping")  # None: S is constant; "adaptive": S starts at clip_norm
    mask: Any = part("mask")  # None: all coordinates are sent
    sample_rate: float = 0.1  # p: the chance of each client to be in a round's cohort
    sampling: Any = part("sampling", "poisson")  # how cohorts are drawn; ε depends on it
    mechanism: Any = part("mechanism", "gaussian")  # which noise is added, and by whom
    rounds: int = 100  # T: how many cohorts are trained
    # server
    server: Any = part("server", "sgd")  # the optimiser that steps with the noisy mean
    averaging: Any = part("averaging")  # None: the last iterate is evaluated and published
    denoise: Any = part("denoise")  # None: the server steps with the noisy mean as it is
    # run
    seed: int | None = None  # None: OS entropy, private; a number: reproducible, NOT PRIVATE
    data_seed: int = 0  # partition and splits: the same for all seeds, so that methods are compared pairwise
    test_views: int = 1  # views that a prediction averages: the sample itself, the others by method "augment"
    eval_every: int | None = None  # None: about twenty times a run
    checkpoint_every: int = 10  # rounds between checkpoints, which a stopped run resumes from

    def __post_init__(self) -> None:
        check_types(self)
        for f in fields(self):
            if "part" in f.metadata:
                value = convert_part(f.metadata["part"], getattr(self, f.name), f.metadata["many"], f.name)
                demand(
                    value is not None or f.default is None, f.name, value, f"must be set; the default is {f.default!r}"
                )
                object.__setattr__(self, f.name, value)
        if self.epsilon is None and self.noise_multiplier is None:
            object.__setattr__(self, "epsilon", 2.0)
        _check_privacy(self)
        _check_run(self)
        if self.voting is not None:
            _check_voting(self)
            return
        for method in self.method:
            method.check(self.local)
            method.check_task(self.task)

    @property
    def voting(self) -> Any:
        """Return the voting protocol that this run follows instead of rounds; None for rounds."""
        return next((method for method in self.method if is_a("voting", method)), None)

    def eval_rounds(self) -> int:
        """Return how many rounds lie between two evaluations."""
        return self.eval_every or max(1, self.rounds // 20)


MOST_ROUNDS = 10**7  # that can be composed in a reasonable time
MOST_CLIENTS = 10**8  # that are simulated: each round draws a number for each
SMALLEST_RATE = 1e-9
_MOST_TOML = 2**26  # bytes: a schema's categories can be many
_SMALLEST_CLIP = 1e-30  # near float32's smallest numbers a clipped update may be longer than S


def demand(holds: bool, name: str, value: Any, rule: str) -> None:
    """Check one rule about one value; the message names both."""
    if not holds:
        raise ConfigError(f"{name}={value!r} {rule}")


def demand_between(least: int, most: int, name: str, value: int) -> None:
    """Check that a whole number is neither too small nor so large that it could not be computed."""
    demand(value >= least, name, value, f"must be at least {least}")
    demand(value <= most, name, value, f"must be at most {most:,}")


def _check_privacy(config: Config) -> None:
    eps, sigma = config.epsilon, config.noise_multiplier
    if eps is not None and sigma is not None:
        raise ConfigError(f"epsilon={eps} and noise_multiplier={sigma} are both given; keep one, the other follows")
    demand(eps is None or eps > 0, "epsilon", eps, "must be above 0 (inf: no noise, no privacy)")
    demand(sigma is None or 0 <= sigma < math.inf, "noise_multiplier", sigma, "must be 0 or more")
    rule = f"must be above 0, and {_SMALLEST_CLIP:g} at least (inf only without noise)"
    demand(config.clip_norm >= _SMALLEST_CLIP, "clip_norm", config.clip_norm, rule)
    if math.isinf(config.clip_norm) and eps != math.inf and sigma != 0:
        raise ConfigError("clip_norm=inf needs epsilon=inf: without a clip norm no noise protects anyone")
    if math.isinf(config.clip_norm):
        demand(config.bounding == "clip", "bounding", config.bounding, "needs a finite clip_norm to scale updates to")
        if config.clipping is not None:
            raise ConfigError("clip_norm=inf leaves clipping='adaptive' no norm to start at; set clip_norm=0.1")
    if config.mask is not None:
        config.mask.check(config.server)
        if config.denoise is not None:
            raise ConfigError(
                "denoise takes every coordinate to be noisy, which a mask does not leave; drop one of them"
            )
    demand(0 < config.sample_rate <= 1, "sample_rate", config.sample_rate, "must be in (0, 1]")
    rule = f"is below {SMALLEST_RATE:g}: nearly no round would have a client; raise it"
    demand(config.sample_rate >= SMALLEST_RATE, "sample_rate", config.sample_rate, rule)
    if isinstance(config.delta, float):
        demand(0 < config.delta < 1, "delta", config.delta, 'must be in (0, 1), or "1/N", or "N^-1.1"')


def _check_voting(config: Config) -> None:
    name = config.voting.part_name
    if len(config.method) > 1:
        raise ConfigError(f"method {name!r} is a protocol of its own: give it alone, without other methods")
    idle_at = {
        "bounding": "clip", "clipping": None, "mask": None, "denoise": None, "test_views": 1, "metrics": (),
        "personal": (),
    }  # fmt: skip
    for key, idle in idle_at.items():
        value = getattr(config, key)
        demand(value == idle, key, value, f"does not apply to {name}: it sends no updates")
    if getattr(config.sampling, "scheduled", False):
        raise ConfigError(
            f"sampling={config.sampling.part_name!r} does not apply to {name}: all clients vote on every query; drop it"
        )
    if not config.task.classes:
        raise ConfigError(f"method {name!r} votes for classes, which task {config.task.part_name!r} does not have")
    if config.mechanism.part_name != "gaussian":
        raise ConfigError(
            f"mechanism={config.mechanism.part_name!r} does not apply to {name}, whose votes get Gaussian noise; "
            'set mechanism = "gaussian"'
        )


def _check_run(config: Config) -> None:
    if config.clients is not None:
        demand_between(1, MOST_CLIENTS, "clients", config.clients)
    demand(0 <= config.validation_share < 1, "validation_share", config.validation_share, "must be in [0, 1)")
    if config.evaluate == "validation" and config.validation_share == 0:
        raise ConfigError("evaluate='validation' needs validation_share above 0, for instance 0.1")
    _check_personal(config)
    demand_between(1, MOST_ROUNDS, "rounds", config.rounds)
    demand(config.eval_every is None or config.eval_every >= 1, "eval_every", config.eval_every, "must be at least 1")
    demand_between(1, 10**4, "test_views", config.test_views)
    if config.test_views > 1 and not any(method.part_name == "augment" for method in config.method):
        raise ConfigError(f"test_views={config.test_views} needs method 'augment', which makes the views")
    if config.test_views > 1 and not config.task.classes:
        raise ConfigError(
            f"test_views={config.test_views} averages probabilities of classes, which task {config.task.part_name!r} "
            "does not have; drop it"
        )
    demand(config.checkpoint_every >= 1, "checkpoint_every", config.checkpoint_every, "must be at least 1")
    seed = config.seed
    demand(seed is None or seed >= 0, "seed", seed, "must be 0 or more (leave it out for privacy)")


def _check_personal(config: Config) -> None:
    twice = next((name for name in config.personal if config.personal.count(name) > 1), None)
    if "" in config.personal or twice is not None:
        raise ConfigError(f"personal={list(config.personal)} must be different patterns of parameters' names")
    demand_between(0, 10**6, "personal_steps", config.personal_steps)
    if config.personal_steps and not config.personal:
        raise ConfigError(f"personal_steps={config.personal_steps} needs personal parameters to train")
    needing = next((method for method in config.method if getattr(method, "needs_personal", False)), None)
    if needing is not None and not config.personal:
        raise ConfigError(
            f"method {needing.part_name!r} trains personal parameters, and there are none; name them: "
            'personal = ["head.*"]'
        )


def from_dict(table: Mapping[str, Any]) -> Config:
    """Make a configuration from plain values, as TOML and JSON give them."""
    config = from_table(Config, spelled_out(table))
    assert isinstance(config, Config)
    return config


# Non-private references that separate the losses: none, the clip's, and (any other method) the clip's and the noise's.
REFERENCES: dict[str, dict[str, float]] = {
    "fedavg": {"clip_norm": math.inf, "epsilon": math.inf},
    "clip-only": {"epsilon": math.inf},
}


def spelled_out(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table in today's keys, with `method = "fedavg"` and `"clip-only"` spelled out.

    A value that contradicts the name is an error. Version 0.1 said where noise is added: only the server adds it now.
    """
    table = dict(table)
    mechanism = table.get("mechanism")
    if isinstance(mechanism, Mapping) and "placement" in mechanism:
        if mechanism["placement"] != "server":
            raise ConfigError(
                f"mechanism.placement={mechanism['placement']!r}: shares of rounded Gaussian noise do not add up to "
                'it; use mechanism = { name = "ddgauss", mode = "exact" }, or drop placement'
            )
        table["mechanism"] = {key: value for key, value in mechanism.items() if key != "placement"}
    name = table.get("method")
    if not isinstance(name, str) or name not in REFERENCES:
        return table
    for key, value in REFERENCES[name].items():
        given = table.get(key)
        if given is not None and given != value:
            raise ConfigError(f"method={name!r} means {key}={value}, but {key}={given!r} is given; drop one of them")
    return {**table, **REFERENCES[name], "method": []}


def to_dict(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as plain values: every key, every part's settings."""
    return to_table(config)


def canonical(value: Any) -> str:
    """Write JSON with sorted keys: the same text for the same content (infinity as a string: JSON has none)."""

    def plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {str(key): plain(entry) for key, entry in item.items()}
        if isinstance(item, list | tuple):
            return [plain(entry) for entry in item]
        return str(item) if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), sort_keys=True)


# Keys that came after results were first kept: at these values they leave the hash of a configuration as it was.
_LATER: dict[str, Any] = {
    "denoise": None, "test_views": 1, "task": {"name": "classification"}, "metrics": [], "personal": [],
    "personal_steps": 0,
}  # fmt: skip
_LATER_OF_LOCAL: dict[str, Any] = {"optimizer": "sgd", "betas": [0.9, 0.999], "adam_epsilon": 1e-8}
_NOT_HASHED = {"population"}  # decides no result: whose budget pays for it
_GAUSSIAN = {"name": "gaussian", "placement": "server"}  # as version 0.1 wrote it


def config_hash(config: Config) -> str:
    """Return twelve hex digits that change when anything that decides the result changes: a name for files."""
    return config_digest(config)[:12]


def config_digest(config: Config) -> str:
    """Return the whole hash, which nobody can find a second configuration for."""
    hashed = {key: value for key, value in as_first_kept(to_dict(config)).items() if key not in _NOT_HASHED}
    if hashed["mechanism"] == {"name": "gaussian"}:  # as earlier versions wrote it: their results keep their keys
        hashed["mechanism"] = _GAUSSIAN
    return hashlib.sha256(canonical(hashed).encode()).hexdigest()


def as_first_kept(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved configuration without keys that came later, where they have no effect: old and new compare."""

    def without(part: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key not in later or value != later[key]}

    return without({**table, "local": without(table["local"], _LATER_OF_LOCAL)}, _LATER)


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("name"), str)


def _is_metric(value: Any) -> bool:
    return isinstance(value, str) or _is_part(value)


_FORM: dict[str, Callable[[Any], bool]] = {
    "method": lambda value: isinstance(value, list) and all(map(_is_part, value)),
    "dataset": _is_part,
    "model": _is_part,
    "mechanism": _is_part,
    "rounds": lambda value: type(value) is int,
    "clip_norm": lambda value: isinstance(value, int | float | str),
    "seed": lambda value: value is None or type(value) is int,
    "own": lambda value: value is None or isinstance(value, Mapping),
    "task": lambda value: value is None or _is_part(value),  # None: of an earlier version
    "metrics": lambda value: value is None or (isinstance(value, list) and all(map(_is_metric, value))),
}


def demand_form(resolved: Mapping[str, Any], name: object) -> None:
    """Check a run's configuration as far as pages read it. Its parts may be plugins that are not loaded now."""
    wrong = next((key for key, holds in _FORM.items() if not holds(resolved.get(key))), None)
    if wrong is not None:
        raise RunError(f"{name}: {wrong} is not what fedblur writes; restore it from a copy")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return `key: old -> new` for every value that differs."""
    lines = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return lines


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as a dictionary, with a one-line error if it cannot be read."""
    try:
        with path.open("rb") as file:  # not `files.read_bytes`: a pipe is welcome, as in `fedblur run <(…)`
            data = read_at_most(file, _MOST_TOML)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a TOML file") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is larger than {_MOST_TOML // 2**20} MiB; give the path of a TOML file") from None
    try:
        return tomllib.loads(data.decode())
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply; write fewer brackets and dots") from None
    except (ValueError, UnicodeDecodeError) as error:  # also numbers of too many digits
        json_ = " (it looks like JSON; TOML is written key = value)" if data[:1] == b"{" else ""
        raise ConfigError(f"{path} is not valid TOML: {error}{json_}; fix that line") from None


def parse_value(text: str) -> Any:
    """Parse a value typed after `--set key=`: TOML if it parses (1, 0.5, true, [..], inf), else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text
    except RecursionError:
        raise ConfigError(f"{text[:20]}… is nested too deeply; write fewer brackets") from None


def apply_overrides(table: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply `--set model.variant=a`, `--set method.blur.strength=0.8`, `--set clip_norm=0.3` to a table."""
    result = dict(table)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r} must look like key=value, for instance clip_norm=0.3")
        _assign(result, key.strip().split("."), parse_value(text.strip()), key.strip())
    return result


def _assign(table: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    head, *rest = path
    if not rest:
        table[head] = value
        return
    inner = table.get(head)
    if head == "method":
        table[head] = _assign_method(inner, rest, value, key)
        return
    if inner is None:
        inner = {}
        merged = head == "local" or ("recipe" in table and head in ("model", "server"))  # into what the recipe has
        if not merged:  # into the part that the configuration has where none is named
            known = {f.name: f for f in fields(Config)}
            if head not in known:
                raise ConfigError(f"--set {head}.…: unknown key {head!r}: {nearest(head, known)}")
            inner = known[head].default if "part" in known[head].metadata else None
            if not isinstance(inner, str):
                raise ConfigError(f"--set {head}.…: set {head}=NAME first, then its settings")
    if not isinstance(inner, str | Mapping):
        raise ConfigError(f"--set {key}: {head}={inner!r} has no settings below it")
    inner = {"name": inner} if isinstance(inner, str) else dict(inner)
    _assign(inner, rest, value, key)
    table[head] = inner


def _assign_method(methods: Any, path: list[str], value: Any, key: str) -> list[dict[str, Any]]:
    if isinstance(methods, str):
        methods = methods.split("+")
    if not isinstance(methods, list | tuple | None) or not all(isinstance(m, str | Mapping) for m in methods or []):
        raise ConfigError(f"--set {key}: method={methods!r} must be names of methods, or a list of them")
    entries = [{"name": entry} if isinstance(entry, str) else dict(entry) for entry in methods or []]
    name, *rest = path
    for entry in entries:
        if entry.get("name") == name and rest:
            _assign(entry, rest, value, key)
            return entries
    raise ConfigError(f"--set {key}: {name!r} is not among the methods of this run; add it with --method")
