"""What a client sends: clipped or normalised, on a public support, with a bit; its exact norm keeps the bound."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedblur
from fedblur.core.config import from_dict
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Seeded
from fedblur.privacy.clipping import Message, normalise_l2
from fedblur.training.round import run_round
from tests.privacy.test_clipping import exact_norm
from tests.training.test_round import first_state, protocol


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 300),
    scale=st.floats(-37, 37),
    clip_norm=st.floats(1e-6, 1e6),
)
@settings(max_examples=300, deadline=None)
def test_normalise__exact_norm_is_the_bound_and_never_more(
    seed: int, size: int, scale: float, clip_norm: float
) -> None:
    rows = (10.0**scale * torch.randn(3, size, generator=torch.Generator().manual_seed(seed)).double()).float()
    bounded, _ = normalise_l2(rows, clip_norm)
    for row, before in zip(bounded.value, rows, strict=True):
        norm = exact_norm(row)
        assert norm <= clip_norm
        assert norm >= clip_norm * (1 - 2**-20) or not bool(torch.isfinite(before).all())


def test_normalise__holds_in_float64_on_a_million_values() -> None:
    rows = torch.randn(2, 1_200_000, generator=torch.Generator().manual_seed(0))
    rows[1] *= 1e-20
    for clip_norm in (0.03, 1.0):
        norms = normalise_l2(rows, clip_norm)[0].value.double().norm(dim=1)
        assert bool((norms <= clip_norm).all())
        assert bool((norms >= clip_norm * (1 - 1e-6)).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_normalise__non_finite_becomes_zero(bad: float) -> None:
    rows = torch.ones(3, 10)
    rows[1, 4] = bad
    value = normalise_l2(rows, 0.5)[0].value
    assert bool((value[1] == 0).all())
    assert bool((value[[0, 2]] != 0).all())


def test_normalise__zero_stays_zero_dust_and_huge_reach_the_norm() -> None:
    rows = torch.stack([torch.zeros(8), torch.full((8,), 1e-44), torch.full((8,), 3e38)])
    norms = normalise_l2(rows, 0.1)[0].value.double().norm(dim=1)
    assert norms.tolist() == pytest.approx([0.0, 0.1, 0.1], rel=1e-6)


@given(
    seed=st.integers(0, 2**31),
    scale=st.floats(1e-6, 1e6),
    clip_norm=st.floats(1e-6, 1e6),
    weight=st.floats(1e-4, 1e4),
    bounding=st.sampled_from(["clip", "normalise"]),
)
@settings(max_examples=300, deadline=None)
def test_message__exact_norm_with_its_bit_never_exceeds_the_bound(
    seed: int, scale: float, clip_norm: float, weight: float, bounding
) -> None:
    rows = scale * torch.randn(4, 40, generator=torch.Generator().manual_seed(seed))
    message = Message(bounding, torch.arange(0, 40, 2), bit_weight=weight * clip_norm)
    bounded, _ = message.encode(rows, clip_norm)
    assert bounded.value.shape == (4, 21) == (4, message.width(40))
    assert all(exact_norm(row) <= bounded.l2_bound for row in bounded.value)


def test_message__decodes_to_the_sum_of_updates_and_of_bits() -> None:
    rows = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    rows[0] *= 100
    rows[1, 3] = math.nan  # a refused update: no vector and no bit
    support = torch.tensor([1, 3, 8])
    message = Message("clip", support, bit_weight=0.7)
    bounded, norms = message.encode(rows, 5.0)
    vector, bits = message.decode(bounded.value.double().sum(0), 9)
    assert bits == pytest.approx(float((norms <= 5.0).sum()) / 2 - 0.5, rel=1e-5)
    assert set(torch.nonzero(vector).flatten().tolist()) == set(support.tolist())
    torch.testing.assert_close(vector[support], bounded.value[:, :3].double().sum(0))


def test_message__the_norm_is_that_of_the_coordinates_that_are_sent() -> None:
    rows = torch.tensor([[3.0, 100.0, 4.0]])
    bounded, norms = Message(support=torch.tensor([0, 2])).encode(rows, 10.0)
    assert float(norms) == 5.0
    assert bounded.value.tolist() == [[3.0, 4.0]]


def test_round__normalised_updates_all_have_the_clip_norm(tmp_path: Path) -> None:
    """Clip far above all norms: clipping would change nothing, normalising sends S from everyone."""
    p = protocol(tmp_path, sigma=0.0, clip_norm=50.0, bounding="normalise")
    report = run_round(p, first_state(p), Seeded.root(0)).local_only
    norms = report["norm_quantiles"]
    assert max(norms) < 50.0
    assert report["clipped_share"] == 0.0
    assert report["alpha_bar"] > 2.0  # how much longer an update became
    clipped = dataclasses.replace(p, bounding="clip")
    assert run_round(clipped, first_state(p), Seeded.root(0)).local_only["alpha_bar"] == 1.0
    assert report["kappa"] > 0.05


def test_normalise__trains_by_name_and_says_so(tmp_path: Path) -> None:
    run = fedblur.train(from_dict({"bounding": "normalise", "rounds": 2, "seed": 0}), out=tmp_path / "run")
    assert "exactly" in run.summary["privacy"]["clipping"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"bounding": "normalise", "clip_norm": math.inf, "epsilon": math.inf}, "bounding='normalise' needs a finite"),
        ({"clipping": "adaptive", "clip_norm": math.inf, "epsilon": math.inf}, "no norm to start at"),
        ({"bounding": "normalize"}, "bounding='normalize'"),
        ({"bounding": "normalise", "method": "ae-dpfl"}, "bounding='normalise' does not apply to ae-dpfl"),
        ({"mask": "random", "method": "knn-dpfl"}, "does not apply to knn-dpfl"),
    ],
)
def test_bounding__settings_that_contradict_are_refused(table, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(table)


# --- messages that came from elsewhere ---


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.floats(1e-3, 1e3), st.sampled_from(["clip", "normalise"]), st.sampled_from([0.0, 0.7]))
def test_accept__what_a_client_encodes_holds_bit_for_bit(width: int, scale: float, how, bit: float) -> None:
    updates = scale * torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    message = Message(how, None, bit)
    sent, _ = message.encode(updates, 0.3)
    bounded, norms, holds = message.accept(sent.value, 0.3)
    assert bool(holds.all())
    assert torch.equal(bounded.value, sent.value)
    assert bounded.l2_bound == message.l2_bound(0.3)
    assert bool((norms <= bounded.l2_bound).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38, 0.31])
def test_accept__a_row_that_is_too_long_or_not_finite_counts_as_zero(bad: float) -> None:
    rows = torch.tensor([[0.1, 0.1], [bad, 0.1], [0.0, 0.29]])
    bounded, norms, holds = Message().accept(rows, 0.3)
    assert holds.tolist() == [True, False, True]
    assert torch.equal(bounded.value, torch.tensor([[0.1, 0.1], [0.0, 0.0], [0.0, 0.29]]))
    assert float(norms[1]) == 0.0
