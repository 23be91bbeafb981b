"""Stage 0, federation. In: a data set, a partition, N. Out: N training clients, validation and test samples.

Validation clients never train: settings are tuned on them. A hash of each natural client's id decides its role
(`roles.py`), and `clients` is then a cap. Made-up clients are nobody: N/(1 - share) of them are cut, so that N stays
exact, and their roles are drawn at random. (One client more deals all samples again, so there is no role to keep.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedblur.core.errors import ConfigError, DataError
from fedblur.core.registry import build
from fedblur.core.rng import Seeded
from fedblur.data.dataset import Dataset, Divided, Generated, Raw
from fedblur.data.partition import Iid, Natural
from fedblur.data.population import Federation, Inputs, Packed, Samples, tensors_of
from fedblur.data.roles import divide, members_of


def load_federation(
    dataset: Any,
    partition: Any = None,
    clients: int | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
    data_dir: Path | None = None,
) -> Federation:
    """Load a data set by name, table or part, and divide it; None takes the data set's own default."""
    _check_request(clients, validation_share)
    part = build("dataset", dataset)
    if isinstance(part, Generated):
        if partition is not None and not isinstance(build("partition", partition), Natural):
            raise ConfigError(f"{part.part_name} generates its own clients; leave partition out (or 'natural')")
        wanted = clients or part.default_clients
        if wanted is None:
            raise ConfigError(f"{part.part_name} has no default number of clients; give clients=N")
        return replace(part.federation(wanted, validation_share, seed), public=part.public)
    if isinstance(part, Divided):
        if partition is not None and not isinstance(build("partition", partition), Natural):
            raise ConfigError(f"{part.part_name} knows its users; leave partition out (or 'natural')")
        return part.federation(clients, validation_share, seed, data_dir)
    raw = part.load(data_dir)
    if partition is None:
        no_writers = part.default_partition == "natural" and raw.owners is None
        partition = "dirichlet" if no_writers else part.default_partition
    chosen = build("partition", partition)
    if raw.train.y.dim() != 1 and not isinstance(chosen, Natural | Iid):
        raise ConfigError(
            f"partition={chosen.part_name!r} goes by each sample's one label, but samples of {part.part_name} have "
            "several targets here; use 'natural' or 'iid'"
        )
    roles, made_up = (_natural_roles, "") if isinstance(chosen, Natural) else (_made_up_roles, raw.made_up_note)
    plan = roles(part, raw, clients, validation_share, seed)
    owners = chosen.owners(raw.train.y, plan.clients, Seeded.root(seed).child("partition").numpy(), raw.owners)
    data = _federation(part.part_name, raw, owners, plan, "; ".join(filter(None, (made_up, raw.note))))
    ids = raw.names or [str(client) for client in range(plan.clients)]
    return replace(data, public=part.public, members="" if part.public else members_of(ids))


@dataclass(frozen=True)
class _Roles:
    """The division of the clients that are cut: those who train, and those for validation."""

    clients: int  # cut in all
    train: Tensor
    validation: Tensor
    by_id: bool


def _natural_roles(part: Dataset, raw: Raw, clients: int | None, share: float, seed: int) -> _Roles:
    if raw.owners is None:
        raise DataError(
            f"partition='natural': these {part.part_name} samples have no writers; use 'dirichlet' or 'iid'"
        )
    people = torch.unique(raw.owners).tolist()
    total = len(people)
    names = [str(person) if raw.names is None else raw.names[person] for person in people]
    train, validation = divide(names, share, seed, clients)
    able = total - len(validation)
    if able < 1:
        raise ConfigError(f"validation_share={share} of {total} natural clients leaves none to train; lower it")
    if able < (clients or 1):
        raise ConfigError(
            f"clients={clients} but {part.part_name} has {total} natural clients here, {able} of them for "
            f"training (validation_share={share}); lower clients"
        )
    return _Roles(total, train, validation, by_id=True)


def _made_up_roles(part: Dataset, raw: Raw, clients: int | None, share: float, seed: int) -> _Roles:
    wanted = clients or part.default_clients
    if wanted is None:
        raise ConfigError(f"{part.part_name} has no default number of made-up clients; give clients=N")
    validation = max(1, round(wanted * share / (1 - share))) if share > 0 else 0
    total = wanted + validation
    if total > len(raw.train):
        raise ConfigError(
            f"clients={wanted} and {validation} for validation are more than the {len(raw.train)} training "
            f"samples of {part.part_name}; lower clients"
        )
    # at random: late clients can differ (Dirichlet pools run dry), and roles must not depend on that
    order = torch.from_numpy(Seeded.root(seed).child("roles").numpy().permutation(total))
    return _Roles(total, order[:wanted], order[wanted:], by_id=False)


def _check_request(clients: int | None, share: float) -> None:
    if clients is not None and clients < 1:
        raise ConfigError(f"clients={clients} must be at least 1")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"validation_share={share!r} must be in [0, 1)")


def _federation(name: str, raw: Raw, owners: Tensor, roles: _Roles, note: str) -> Federation:
    validation, sizes = None, None
    if len(roles.validation):
        held = _pack(raw, owners, roles.validation, roles.clients)
        validation, sizes = held.samples(), held.sizes
    train = _pack(raw, owners, roles.train, roles.clients)
    return Federation(name, train, validation, len(roles.validation), raw.test, note, sizes, roles.by_id)


def _pack(raw: Raw, owners: Tensor, ids: Tensor, clients: int) -> Packed:
    """Pack only these clients' samples, renumbered in the order of `ids`; others' samples are not copied."""
    renumber = torch.full((clients + 1,), -1, dtype=torch.int64)  # the last entry is for owner -1
    renumber[ids] = torch.arange(len(ids))
    return Packed.from_owners(raw.train.x, raw.train.y, renumber[owners], raw.classes)


def federation_from_arrays(
    x: Any,
    y: Any,
    owners: Any,
    test_x: Any,
    test_y: Any,
    classes: int | None = None,
    validation_share: float = 0.0,
    seed: int = 0,
    names: Sequence[str] | None = None,
    population: str | None = None,
    public: bool = False,
    test_owners: Any = None,
) -> Federation:
    """Make a federation of numpy arrays or tensors: samples, labels, and the client 0..N-1 of each (-1: left out).

    uint8 samples are images (models see them divided by 255). Whole numbers reach a model that reads tokens as they
    are, and any other as float32. `x` may be a dictionary of arrays: several inputs by the names of the model's
    arguments, whose whole numbers are tokens.

    `y` is what the task predicts: one whole number per sample, or several ([samples, labels]; tokens, below 0 at
    padding), or numbers.

    `classes` is what you know beforehand, or it is counted in the test labels, which are public. It is never counted in
    clients' labels, because the model's shape tells it to everyone. A client's label beyond it is an error here, before
    anything is released.

    With a `validation_share` each client validates or trains by a hash of its name, `seed` and the share: about that
    share of them, and nobody's role depends on who else is there. A client's name is its number; if numbers change when
    others come and go, give `names`, what each client is always called.

    `population` names these people: all runs on them share one budget (docs/populations.md). Without it they are known
    by a keyed hash of the clients' names. `public=True` says that the data are no secret: nothing is tracked.

    `test_owners` says whose each test sample is, in the numbers of `owners` (-1: nobody's): with personal parameters,
    each client's own model is then measured on its own held-out samples (docs/personal.md).
    """
    _check_request(None, validation_share)
    train, test = own_samples("", x, y), own_samples("test_", test_x, test_y)
    own, other = (_shapes(samples.x) for samples in (train, test))
    if own != other:
        raise DataError(f"x has samples of shape {own}, test_x of {other}; they must agree")
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or not 0 < classes <= 10**6):
        raise DataError(f"classes={classes!r} must be a whole number from 1 to 1,000,000")
    if train.y.dtype != test.y.dtype or train.y.shape[1:] != test.y.shape[1:]:
        forms = [f"{[*y.shape[1:]]} of {y.dtype}" for y in (train.y, test.y)]
        raise DataError(
            f"y has targets {forms[0]}, test_y {forms[1]}; they must agree: for classes or tokens both are an array of "
            "ints, for numbers to predict both are floats"
        )
    known = _known_classes(test.y, classes)
    if not test.y.is_floating_point():
        advice = "number the labels from 0, or give classes (numbers to predict: give floats)"
        counted = f"the test labels show {known} classes: give classes=, the number that is known without looking at y"
        _check_labels("test_y", test.y, known, advice)
        _check_labels("y", train.y, known, advice if classes is not None else counted)
    who = _own_clients(owners, len(train))
    total = int(who.max()) + 1
    if names is not None and not isinstance(names, Sequence | np.ndarray):
        raise DataError(f"names={names!r} must be a list with the name of each client")
    given = [str(name) for name in (range(total) if names is None else names)]
    if len(given) != total or len(set(given)) != total:
        raise DataError(
            f"names has {len(given)} entries, {len(set(given))} of them different, for {total} clients; "
            "each client needs one of its own"
        )
    training, validation = divide(given, validation_share, seed)
    if not len(training):
        raise DataError(f"validation_share={validation_share} of {total} clients leaves none to train; lower it")
    if validation_share > 0 and not len(validation):
        raise DataError(
            f"validation_share={validation_share} of {total} clients gives no validation client: each is drawn on its "
            "own; raise it"
        )
    roles = _Roles(total, training, validation, by_id=validation_share > 0)
    note = "" if test_owners is None else "test samples are held out of clients' own"
    data = _federation("arrays", Raw(train, test, who, known, note), who, roles, note)
    if test_owners is not None:
        data = replace(data, test_owners=_test_owners(test_owners, len(test), training, total))
    return replace(data, population=population, public=public, members=members_of(given))


def _test_owners(owners: Any, samples: int, training: Tensor, clients: int) -> Tensor:
    """Return whose each test sample is among the training clients; -1: nobody's, or a validation client's."""
    who = _whole_numbers("test_owners", owners)
    if len(who) != samples:
        raise DataError(f"{samples} test samples but {len(who)} test_owners; each sample needs one (-1: nobody)")
    if len(who) and not -1 <= int(who.min()) <= int(who.max()) < clients:
        raise DataError(
            f"test_owners run from {int(who.min())} to {int(who.max())}, must be clients 0..{clients - 1} (-1: nobody)"
        )
    numbers = torch.full((clients + 1,), -1, dtype=torch.int64)  # the last entry is for -1
    numbers[training] = torch.arange(len(training))
    return numbers[who]


def own_samples(prefix: str, x: Any, y: Any) -> Samples:
    """Return samples and targets of a user's as they are kept."""
    if isinstance(x, Mapping):
        if not x or not all(isinstance(name, str) and name.isidentifier() for name in x):
            raise DataError(f"{prefix}x names its inputs {list(x)!r}, must be names of the model's arguments")
        inputs: Inputs = {name: own_input(f"{prefix}x[{name!r}]", values, least=1) for name, values in x.items()}
    else:
        inputs = own_input(f"{prefix}x", x, least=2)
    targets = own_targets(f"{prefix}y", y)
    for values in tensors_of(inputs):
        if len(values) != len(targets):
            raise DataError(f"{prefix}x has {len(values)} samples but {prefix}y {len(targets)} labels; each needs one")
    return Samples(inputs, targets)


def own_input(name: str, x: Any, least: int = 2) -> Tensor:
    """Return samples of a user's as they are kept: images uint8, whole numbers int64, numbers float32."""
    values = _tensor(name, x)
    if values.ndim < least or len(values) == 0:
        raise DataError(f"{name} has shape {[*values.shape]}, must be [samples, ...] with at least one sample")
    if values.dtype == torch.uint8:
        return values
    if values.is_floating_point() or values.is_complex():
        values = values.float()
        broken = torch.nonzero(~torch.isfinite(values.reshape(len(values), -1)).all(dim=1)).flatten()
        if len(broken):
            raise DataError(f"{name} has NaN or infinite values, first in sample {int(broken[0])}; clean them first")
        return values
    return values.long()


def own_targets(name: str, y: Any) -> Tensor:
    """Return targets of a user's as they are kept: int64, or float32 for numbers."""
    targets = _tensor(name, y)
    if targets.ndim < 1 or len(targets) == 0 or targets.is_complex():
        raise DataError(
            f"{name} has shape {[*targets.shape]} and type {targets.dtype}, must be [samples] or [samples, ...] of "
            "whole numbers or floats"
        )
    if not targets.is_floating_point():
        return targets.long()
    targets = targets.float()
    broken = torch.nonzero(~torch.isfinite(targets.reshape(len(targets), -1)).all(dim=1)).flatten()
    if len(broken):
        raise DataError(f"{name} has NaN or infinite values, first in sample {int(broken[0])}; drop these samples")
    return targets


def _known_classes(targets: Tensor, classes: int | None) -> int:
    """Return how many classes, labels or tokens there are: as given, or as test targets show; 0 for numbers."""
    if classes is not None:
        return classes
    return 0 if targets.is_floating_point() else 1 + max(0, int(targets.max()))


def _shapes(x: Inputs) -> Any:
    """Return the shape of a sample, or of each of its inputs by name."""
    return {name: [*each.shape[1:]] for name, each in x.items()} if isinstance(x, dict) else [*x.shape[1:]]


def _own_clients(owners: Any, samples: int) -> Tensor:
    who = _whole_numbers("owners", owners)
    if getattr(owners, "dtype", None) in (bool, torch.bool):
        raise DataError("owners are true or false; give each sample the number of its client, 0..N-1")
    if len(who) != samples:
        raise DataError(
            f"owners has {len(who)} entries for {samples} samples; each sample needs one (-1: leave it out)"
        )
    if int(who.min()) < -1 or int(who.max()) < 0:
        raise DataError(
            f"owners run from {int(who.min())} to {int(who.max())}, must be clients 0..N-1 (-1: leave it out)"
        )
    if int(who.max()) >= samples:
        raise DataError(
            f"owners run up to {int(who.max())}, and {samples} samples have at most {samples} clients; number the "
            "clients 0..N-1 without gaps"
        )
    empty = torch.nonzero(torch.bincount(who[who >= 0]) == 0).flatten()
    if len(empty):
        raise DataError(f"client {int(empty[0])} has no samples; number the clients 0..N-1 without gaps")
    return who


def _whole_numbers(name: str, values: Any) -> Tensor:
    tensor = _tensor(name, values)
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex():
        raise DataError(
            f"{name} has shape {[*tensor.shape]} and type {tensor.dtype}, must be one whole number per sample "
            "(an array of ints)"
        )
    return tensor.long()


def _tensor(name: str, values: Any) -> Tensor:
    if isinstance(values, np.ndarray) and not (values.flags.writeable and values.flags.c_contiguous):
        values = values.copy()  # torch warns of one, and refuses views that run backwards
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:  # strings, ragged lists, data frames, None
        kind = f"{type(values).__name__} of {values.dtype}" if hasattr(values, "dtype") else type(values).__name__
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{name} ({kind}) must be an array of numbers, all rows alike: {reason}") from None
    if tensor.layout != torch.strided or tensor.is_meta:
        raise DataError(f"{name} is a {tensor.layout} tensor on {tensor.device}; give a dense one, with its values")
    return tensor


def _check_labels(name: str, labels: Tensor, classes: int, otherwise: str) -> None:
    several = labels.ndim > 1  # where padding is below 0, and the task looks at the rest
    if not (several or int(labels.min()) >= 0) or int(labels.max()) >= classes:
        raise DataError(
            f"{name} runs from {int(labels.min())} to {int(labels.max())}, must be in 0..{classes - 1}; {otherwise}"
        )
