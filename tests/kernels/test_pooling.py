"""Our max-pooling equals torch's, ties, odd sizes and gradients included."""

import pytest
import torch
import torch.nn.functional as F

from fedblur.kernels.convolution import PerClientConvolutions


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": (3, 2)},
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("ties", [False, True])
def test_pooling__equals_torch_under_vmap_and_grad(options, ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, 9, 7, generator=generator, dtype=torch.float64)
    if ties:
        x = (2 * x).round()
    target = torch.randn(F.max_pool2d(x[0], **options).shape, generator=generator, dtype=torch.float64)

    def loss(x):
        return (F.max_pool2d(x, **options) * target).sum()

    def both(x):
        return torch.func.vmap(torch.func.grad_and_value(loss))(x)

    expected = both(x)
    with PerClientConvolutions():
        got = both(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_pooling__is_really_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedblur.kernels import pooling

    called = []
    real = pooling.Windows.forward
    monkeypatch.setattr(pooling.Windows, "forward", staticmethod(lambda *a: called.append(1) or real(*a)))
    with PerClientConvolutions():
        F.max_pool2d(torch.randn(1, 1, 4, 4), 2)
    assert called
