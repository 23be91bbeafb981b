"""Per-client convolutions: the operator under vmap(grad) equals torch's own path, for odd shapes too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.accel.kernels.fused_layers import ClientConv, PerClientLayers

CASES = [
    # channels, outputs, kernel, stride, padding, dilation, groups
    (1, 4, 3, 1, 0, 1, 1),
    (3, 5, (5, 3), (2, 1), (2, 0), (1, 2), 1),
    (4, 6, 3, 2, 1, 1, 1),
    (4, 6, 3, 1, "same", 1, 1),
    (4, 6, 2, 1, "same", 1, 1),  # pads unevenly: torch's path
    (4, 6, 3, 1, "valid", 2, 1),
    (4, 8, 3, 1, 1, 1, 2),  # grouped: torch's path
    (8, 8, 1, 1, 0, 1, 1),
]


def losses(x: Tensor, w: Tensor, bias: Tensor, target: Tensor, case) -> Tensor:
    _, _, _, stride, padding, dilation, groups = case
    return (F.conv2d(x, w, bias, stride, padding, dilation, groups) * target).sum()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:Using padding:UserWarning")
@pytest.mark.parametrize(
    ("case", "compiled"),
    [
        *((case, False) for case in CASES),
        (CASES[1], True),  # compiling takes seconds
        pytest.param(CASES[0], True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_convolution__equals_torch_under_vmap_and_grad(case, compiled: bool) -> None:
    channels, outputs, kernel, stride, padding, dilation, groups = case
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, channels, 9, 8, generator=generator, dtype=torch.float64)
    w = torch.randn(3, outputs, channels // groups, *kernel, generator=generator, dtype=torch.float64)
    bias = torch.randn(3, outputs, generator=generator, dtype=torch.float64)
    target = torch.randn(F.conv2d(x[0], w[0], None, stride, padding, dilation, groups).shape, dtype=torch.float64)

    def gradients(x, w, bias):
        return torch.func.vmap(torch.func.grad(losses, argnums=(0, 1, 2)), in_dims=(0, 0, 0, None, None))(
            x, w, bias, target, case
        )

    def ours(x, w, bias):
        with PerClientLayers():
            return gradients(x, w, bias)

    run = torch.compile(ours, backend="aot_eager") if compiled else ours
    for got, expected in zip(run(x, w, bias), gradients(x, w, bias), strict=True):
        torch.testing.assert_close(got, expected)


def test_layers__only_weights_of_a_clients_own_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen front has one weight for all clients, often of another type: that is torch's own convolution."""
    seen: list[torch.Size] = []
    real = ClientConv.apply
    monkeypatch.setattr(ClientConv, "apply", lambda x, w, *rest: (seen.append(w.shape), real(x, w, *rest))[1])
    x, frozen, own = torch.randn(3, 2, 1, 8, 8), torch.randn(4, 1, 3, 3), torch.randn(3, 5, 4, 3, 3)

    def model(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with PerClientLayers():
            return F.conv2d(F.conv2d(images, frozen), weight)

    got = torch.vmap(model)(x, own)
    assert seen == [own.shape[1:]]
    expected = torch.stack([F.conv2d(F.conv2d(a, frozen), w) for a, w in zip(x, own, strict=True)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
