"""Logit adjustment: the batch's own label mix is explained, so it need not be learned."""

import pytest
import torch
import torch.nn.functional as F

from fedblur.core.errors import ConfigError
from fedblur.learning.methods.balance import Balance

LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
VALID = torch.ones(6, dtype=torch.bool)


def test_balance__changes_nothing_where_all_classes_are_equally_common() -> None:
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    expected = F.softmax(LOGITS, 1)
    torch.testing.assert_close(F.softmax(Balance().adjust(LOGITS, labels, VALID), 1), expected)


def test_balance__adds_the_logarithm_of_the_counts_and_padding_is_not_counted() -> None:
    labels, valid = torch.tensor([0, 0, 0, 1, 0, 0]), torch.tensor([1, 1, 1, 1, 0, 0]).bool()
    adjusted = Balance(strength=0.5, smoothing=0.1).adjust(LOGITS, labels, valid)
    torch.testing.assert_close(adjusted - LOGITS, 0.5 * torch.tensor([3.1, 1.1, 0.1]).log().expand(6, 3))


def test_balance__a_client_of_one_class_learns_next_to_nothing_about_its_mix() -> None:
    labels = torch.zeros(6, dtype=torch.int64)
    sizes = []
    for method in (Balance(strength=0.0), Balance(smoothing=1e-3)):
        logits = torch.zeros(6, 3, requires_grad=True)
        F.cross_entropy(method.adjust(logits, labels, VALID), labels).backward()
        sizes.append(float(logits.grad.norm()))
    assert sizes[1] < 0.01 * sizes[0]


@pytest.mark.parametrize("settings", [{"strength": -1.0}, {"smoothing": 0.0}])
def test_balance__settings_out_of_range_are_named(settings: dict[str, float]) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(ConfigError, match=f"method.balance.{name}={value} must be"):
        Balance(**settings)
