"""LUS keeps exactly s_j entries per scope, ties to the lowest index."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedblur.core.errors import ConfigError
from fedblur.learning.methods.lus import Lus, keep_largest, kept_count
from fedblur.learning.module_function import Layout


@given(
    scores=st.lists(st.integers(0, 4), min_size=1, max_size=60),  # few values: many ties
    share=st.floats(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_lus__keeps_exactly_k_with_ties_to_the_lowest_index(scores: list[int], share: float) -> None:
    count = max(1, round(share * len(scores)))
    mask = keep_largest(torch.tensor(scores, dtype=torch.float32), count)
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    assert sorted(best) == torch.nonzero(mask).flatten().tolist()


def test_lus__works_under_vmap() -> None:
    scores = torch.randint(0, 5, (20, 33), generator=torch.Generator().manual_seed(1)).float()
    together = torch.func.vmap(lambda row: keep_largest(row, 10))(scores)
    assert torch.equal(together, torch.stack([keep_largest(row, 10) for row in scores]))


@pytest.mark.parametrize(
    ("size", "sparsity", "kept"), [(10, 0.7, 3), (1, 0.9, 1), (3, 0.5, 2), (10, 0.0, 10), (7, 0.99, 1)]
)
def test_lus__kept_count(size: int, sparsity: float, kept: int) -> None:
    assert kept_count(size, sparsity) == kept


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 6)
        self.two = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def shaped(lus: Lus, gradient_scale: float = 1.0) -> tuple[dict, dict]:
    layout = Layout.of(Net())
    generator = torch.Generator().manual_seed(0)
    delta = layout.unflatten(torch.randn(layout.total, generator=generator))
    gradient = layout.unflatten(gradient_scale * torch.randn(layout.total, generator=generator))
    return delta, lus.shape_update(delta, gradient, layout)


def nonzero(tensors: dict, *names: str) -> int:
    return sum(int((tensors[name] != 0).sum()) for name in names)


@pytest.mark.parametrize("gradient_scale", [1.0, 0.0])  # 0: every score ties
def test_lus__nonzeros_per_tensor_are_s_j_ties_included(gradient_scale: float) -> None:
    delta, update = shaped(Lus(sparsity=0.7), gradient_scale)
    for name, tensor in update.items():
        assert int((tensor != 0).sum()) == kept_count(tensor.numel(), 0.7)
        kept = tensor != 0
        assert torch.equal(tensor[kept], delta[name][kept])  # what is kept is not changed


def test_lus__scopes() -> None:
    _, by_module = shaped(Lus(sparsity=0.5, scope="module"))
    assert nonzero(by_module, "one.weight", "one.bias") == kept_count(54, 0.5)
    assert nonzero(by_module, "two.weight", "two.bias") == kept_count(28, 0.5)
    _, overall = shaped(Lus(sparsity=0.5, scope="global"))
    assert nonzero(overall, *overall) == kept_count(82, 0.5)


def test_lus__exempt_1d_leaves_biases_dense() -> None:
    delta, update = shaped(Lus(sparsity=0.9, exempt_1d=True))
    assert torch.equal(update["one.bias"], delta["one.bias"])
    assert nonzero(update, "one.weight") == kept_count(48, 0.9)


def test_lus__keeps_the_largest_products_of_gradient_and_update() -> None:
    layout = Layout.of(nn.Linear(4, 1, bias=False))
    delta = {"weight": torch.tensor([[4.0, 1.0, -3.0, 2.0]])}
    gradient = {"weight": torch.tensor([[0.1, 5.0, -1.0, 0.1]])}
    update = Lus(sparsity=0.5).shape_update(delta, gradient, layout)
    assert update["weight"].tolist() == [[0.0, 1.0, -3.0, 0.0]]


def test_lus__zero_sparsity_is_the_identity_bit_for_bit() -> None:
    delta, update = shaped(Lus(sparsity=0.0))
    assert all(torch.equal(update[name], delta[name]) for name in delta)


@pytest.mark.parametrize("bad", [-0.1, 1.0, 1.5])
def test_lus__sparsity_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match=rf"sparsity={bad} must be in \[0, 1\)"):
        Lus(sparsity=bad)
