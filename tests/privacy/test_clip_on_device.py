"""The clip against float64 on rows of any size and value, on each kind of device; a GPU's is skipped by name."""

import math

import pytest
import torch

from fedblur.privacy.clipping import clip_l2

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [(1, 1), (3, 2047), (5, 2048), (7, 50_001), (4, 1_200_000)]


def clip_faults(device: torch.device) -> list[str]:
    """What is wrong with the clip on this device: rows above S in float64, changed bits, bad rows that got through."""
    faults = []
    for rows, width in SIZES:
        generator = torch.Generator().manual_seed(width)
        updates = torch.randn(rows, width, generator=generator) * torch.logspace(-8, 8, rows)[:, None]
        for clip_norm in (1e-3, 1.0, 1e3, float(updates[-1].double().norm())):
            bounded, norms = clip_l2(updates.to(device), clip_norm)
            value, norms, expected = bounded.value.cpu(), norms.cpu(), updates.double().norm(dim=1)
            below = expected < clip_norm * (1 - 1e-6)
            faults += [f"{rows}x{width}: above {clip_norm}"] * bool((value.double().norm(dim=1) > clip_norm).any())
            faults += [f"{rows}x{width}: norms"] * (not torch.allclose(norms, expected, rtol=1e-12, atol=0))
            faults += [f"{rows}x{width}: a short row changed"] * (not torch.equal(value[below], updates[below]))
    for bad in (math.nan, math.inf, -math.inf, 3e38):
        updates = torch.ones(3, 5000)
        updates[1, 4321] = bad
        value = clip_l2(updates.to(device), 1e-6)[0].value.cpu()
        faults += [f"{bad} got through"] * bool((value[1] != 0).any() or not torch.isfinite(value).all())
    return faults


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])])
def test_clip__no_row_is_longer_than_s_on_this_device(device: str) -> None:
    assert clip_faults(torch.device(device)) == []
