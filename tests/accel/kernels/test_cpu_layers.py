"""Layers for one client on a core: torch's values and gradients in any layout, and torch's path for the rest."""

import ctypes
import hashlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.accel.kernels import cpu_layers, native
from fedblur.accel.kernels.cpu_layers import SingleClientLayers
from fedblur.core import cache_files
from fedblur.engines.workers import channels_last

needs_compiler = pytest.mark.skipif(
    native._compiler() is None, reason="no C compiler here, or another system than Linux on x86-64: torch's own layers"
)


SYMBOL = "weight_grad"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for every pool that the kernel took over."""
    return applied(monkeypatch, "_Pooled")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """A process that has compiled nothing yet, with an empty cache."""
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    for known in (native._library, cpu_layers._kernels):
        known.cache_clear()
    yield
    for known in (native._library, cpu_layers._kernels):
        known.cache_clear()


def layers(channels: int = 16, filters: int = 7, kernel: tuple[int, int] = (3, 3), side: tuple[int, int] = (11, 10)):
    torch.manual_seed(0)
    x, weight = torch.randn(4, channels, *side), torch.randn(filters, channels, *kernel) / 8
    return channels_last(x), channels_last(weight), torch.randn(filters)


def gradients(function, *tensors: Tensor) -> list[Tensor]:
    """The output, then the gradients of a sum with fixed weights."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    output = function(*leaves)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, leaves, slope.to(output.dtype))]


def compare(function, *tensors: Tensor) -> None:
    """With the layers against without them in float64."""
    with SingleClientLayers():
        got = gradients(function, *tensors)
    expected = gradients(function, *(tensor.double() for tensor in tensors))
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def applied(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """One for every call of this autograd function."""
    calls: list[int] = []
    kernel = getattr(cpu_layers, name)
    whole = kernel.apply
    monkeypatch.setattr(kernel, "apply", lambda *args: calls.append(1) or whole(*args))
    return calls


def pool_of(x: Tensor, weight: Tensor, bias: Tensor | None = None, padding=0) -> Tensor:
    return F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2)


@needs_compiler
@pytest.mark.parametrize("padding", [0, 1, (2, 0)])
@pytest.mark.parametrize(
    ("channels", "kernel", "side"),
    [
        (32, (3, 3), (26, 26)),
        (16, (3, 3), (7, 9)),  # the last row and column are in no window
        (16, (5, 5), (12, 60)),  # a row of windows is longer than a band
        (64, (1, 1), (4, 2)),
        (48, (2, 3), (9, 6)),
        (8, (3, 2), (8, 8)),
        (160, (3, 3), (6, 6)),  # a row of a patch is more than the registers hold
    ],
    ids=str,
)
def test_pooled__values_and_gradients_are_torchs(calls, channels, kernel, side, padding) -> None:
    compare(lambda x, w, b: pool_of(x, w, b, padding), *layers(channels, 7, kernel, side))
    assert calls  # the layers' own, and where this shape is new one to see whether the kernel agrees


@needs_compiler
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: F.max_pool2d(torch.relu(F.conv2d(x, w, b)), 2),
        lambda x, w, b: torch.max_pool2d(F.relu(F.conv2d(x, w, b)), (2, 2), (2, 2)).sin(),
        lambda x, w, b: torch.relu(pool_of(x, w, b)).flatten(1) ** 2,
        lambda x, w, b: pool_of(x, w) + b[:, None, None],
        lambda x, w, b: (y := F.conv2d(x, w, b)).relu().mean((2, 3)) * F.max_pool2d(y.relu(), 2).mean((2, 3)),
    ],
    ids=["relu first", "functions", "relu second", "no bias", "used twice"],
)
def test_pooled__layers_around_it_do_not_matter(calls, function) -> None:
    compare(function, *layers())
    assert calls


@needs_compiler
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 3),
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2, stride=1),
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2, padding=1),
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2, ceil_mode=True),
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2, return_indices=True)[0],
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b, stride=2), 2),
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b, dilation=2), 2),
        lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b).mul_(2), 2),
        lambda x, w, b: F.max_pool2d(F.relu(F.conv2d(x, w, b), inplace=True), 2),
        lambda x, w, b: F.max_pool2d(F.conv2d(x[:, :5], w[:, :5], b), 2),
        lambda x, w, b: F.max_pool2d(F.conv2d(x.contiguous(), w, b).contiguous(), 2),
        lambda x, w, b: F.max_pool2d(x, 2) + 0 * w.sum() + 0 * b.sum(),
    ],
    ids=str.split("3x3 overlap padded ceil indices stride dilation in-place relu-in-place few nchw no-convolution"),
)
def test_pooled__what_is_not_covered_is_torchs(calls, function) -> None:
    compare(function, *layers())
    assert not calls


@needs_compiler
def test_pooled__equals_go_where_torch_sends_them(calls) -> None:
    x, weight, bias = layers()
    x, weight, bias = x.round().clamp(-1, 1), channels_last(weight.sign()), bias.round()  # sums without rounding
    y = torch.conv2d(x, weight, bias)
    values, where = cpu_layers._kernels(16, 3, 3).pool(y)
    expected, indices = F.max_pool2d(y, 2, return_indices=True)
    corners = 2 * torch.arange(values.shape[-2])[:, None] * y.shape[-1] + 2 * torch.arange(values.shape[-1])
    assert torch.equal(values, expected)
    assert torch.equal(corners + where // 2 * y.shape[-1] + where % 2, indices)
    compare(pool_of, x, weight, bias)


@needs_compiler
def test_pooled__a_nan_is_not_lost(calls) -> None:
    """So that an update which is not finite is still seen to be so by the clip."""
    x, weight, bias = layers()
    x[0, :, 4, 4] = torch.nan
    with SingleClientLayers():
        output = torch.relu(pool_of(x, weight.requires_grad_(), bias))
    expected = torch.relu(F.max_pool2d(torch.conv2d(x, weight, bias), 2))
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    (found,) = torch.autograd.grad(output.square().sum(), [weight])
    assert found.isnan().all()
    assert calls


@needs_compiler
def test_pooled__the_convolutions_own_gradients_are_not_computed(monkeypatch) -> None:
    monkeypatch.setattr(cpu_layers._Convolution, "backward", lambda *_: pytest.fail("paid twice"))
    x, weight, bias = layers()
    with SingleClientLayers():
        gradients(pool_of, x, weight, bias)


@needs_compiler
def test_pooled__only_the_gradients_that_are_asked_for(monkeypatch) -> None:
    x, weight, bias = layers()
    cpu_layers._kernels(16, 3, 3)
    monkeypatch.setattr(cpu_layers.Kernels, "input_grad", lambda *_: pytest.fail("nobody asked"))
    with SingleClientLayers():
        output = pool_of(x, weight.requires_grad_(), bias)
    (found,) = torch.autograd.grad(output.sum(), [weight])
    assert found.shape == weight.shape


@needs_compiler
def test_pooled__without_gradients_nothing_is_noted(calls) -> None:
    x, weight, bias = layers()
    with SingleClientLayers(), torch.no_grad():
        assert torch.equal(pool_of(x, weight, bias), F.max_pool2d(torch.conv2d(x, weight, bias), 2))
    assert not calls


@needs_compiler
def test_pooled__threads_side_by_side_have_the_bits_of_one(anew) -> None:
    x, weight, bias = layers(32, 64, (3, 3), (26, 26))
    results: list[list[Tensor]] = []

    def work() -> None:
        with SingleClientLayers():
            results.append(gradients(pool_of, x, weight, bias))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    assert len(results) == 5
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[-1], strict=True))


@needs_compiler
def test_pooled__a_kernel_that_computes_something_else_is_not_used(anew, monkeypatch, calls) -> None:
    right = cpu_layers.Kernels.weight_grad
    monkeypatch.setattr(cpu_layers.Kernels, "weight_grad", lambda *args: 1.001 * right(*args))
    compare(pool_of, *layers()[:2])
    assert len(calls) == 1  # the look at it


def test_pooled__can_be_switched_off(calls, monkeypatch) -> None:
    monkeypatch.setenv("FEDBLUR_NATIVE", "off")
    compare(pool_of, *layers())
    assert not calls


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "echo"])
def test_pooled__without_a_compiler_that_works_it_is_torchs(anew, calls, monkeypatch, compiler) -> None:
    monkeypatch.setenv("CC", compiler)
    compare(pool_of, *layers())
    assert not calls


def test_pooled__on_another_system_it_is_torchs(anew, calls, monkeypatch) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    compare(pool_of, *layers())
    assert not calls


@needs_compiler
def test_native__a_library_is_compiled_once_and_kept(anew, monkeypatch, tmp_path) -> None:
    first = native.library("pooled", KH=3, KW=3, CIN=16)
    assert isinstance(first, ctypes.CDLL)
    assert first is native.library("pooled", CIN=16, KH=3, KW=3)
    (kept,) = (tmp_path / "cache").glob("*.so")
    native._library.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    again = native.library("pooled", KH=3, KW=3, CIN=16)
    assert again is not None
    assert hasattr(again, SYMBOL)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {kept.name, f"{kept.name}.sha256"}


@needs_compiler
def test_native__another_cpu_has_a_library_of_its_own(anew, monkeypatch, tmp_path) -> None:
    native.library("pooled", KH=3, KW=3, CIN=16)
    native._library.cache_clear()
    monkeypatch.setattr(native, "_target", lambda _: b"another CPU")
    native.library("pooled", KH=3, KW=3, CIN=16)
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2


def planted(folder) -> bytes:
    """A library without our functions."""
    (folder / "planted.c").write_text("int planted;")
    command = [*native._compiler(), *native._FLAGS, str(folder / "planted.c")]
    return native._compile(command, folder).read_bytes()


@needs_compiler
@pytest.mark.parametrize("way", ["replaced", "in a shared folder", "of another user", "a link"])
def test_native__a_planted_library_is_not_loaded(anew, tmp_path, monkeypatch, way) -> None:
    native.library("pooled", KH=3, KW=3, CIN=16)
    native._library.cache_clear()
    (kept,) = (tmp_path / "cache").glob("*.so")
    kept.write_bytes(planted(tmp_path))
    if way != "replaced":  # its digest is planted too
        kept.with_name(f"{kept.name}.sha256").write_text(hashlib.sha256(kept.read_bytes()).hexdigest())
    if way == "in a shared folder":
        kept.parent.chmod(0o1777)
    elif way == "of another user":
        monkeypatch.setattr(cache_files, "_trusted", lambda: {65_534})
    elif way == "a link":
        kept.symlink_to(kept.rename(tmp_path / "elsewhere.so"))
    with pytest.warns(UserWarning, match="is not used"):
        library = native.library("pooled", KH=3, KW=3, CIN=16)
    assert hasattr(library, SYMBOL)


@needs_compiler
@pytest.mark.parametrize("folder", ["a file", "none"])
def test_native__a_cache_that_cannot_be_written_only_costs_time(anew, monkeypatch, tmp_path, folder) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path / "file" if folder == "a file" else None)
    assert native.library("pooled", KH=3, KW=3, CIN=16) is not None


@needs_compiler
@pytest.mark.parametrize("share", [0.01, 0.5])  # half of it was loaded, and ended the process by SIGBUS
def test_native__a_library_cut_short_is_compiled_again(anew, tmp_path, share) -> None:
    native.library("pooled", KH=1, KW=2, CIN=48)
    (kept,) = (tmp_path / "cache").glob("*.so")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: int(share * len(whole))])
    native._library.cache_clear()
    with pytest.warns(UserWarning, match="its content is not what was written"):
        assert hasattr(native.library("pooled", KH=1, KW=2, CIN=48), SYMBOL)
    assert len(kept.read_bytes()) == len(whole)


@pytest.mark.parametrize("layout", [channels_last, lambda tensor: tensor], ids=["nhwc", "nchw"])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"), [(1, 0, 1, 1), (2, (1, 0), 1, 1), (1, 2, 2, 1), (1, 1, 1, 3)]
)
def test_layers__convolutions_are_torchs(layout, stride, padding, dilation, groups, monkeypatch) -> None:
    torch.manual_seed(0)
    calls = applied(monkeypatch, "_Convolution")
    x, weight, bias = layout(torch.randn(4, 6, 11, 9)), layout(torch.randn(9, 6 // groups, 3, 3)), torch.randn(9)
    compare(lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups), x, weight, bias)
    assert len(calls) == 1  # float64 takes torch's own path


@pytest.mark.parametrize("bias", [True, False])
def test_layers__dense_layers_are_torchs(bias, monkeypatch) -> None:
    torch.manual_seed(0)
    calls = applied(monkeypatch, "_Dense")
    for width in (700, 6):  # few weights are not worth the choice of a kernel
        compare(F.linear, torch.randn(5, width), torch.randn(100, width), *([torch.randn(100)] if bias else []))
    assert len(calls) == int(cpu_layers._has_onednn())


def test_layers__what_is_not_covered_is_torchs() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 6, 8, 8), torch.randn(9, 6, 3, 3), torch.randn(9)
    with SingleClientLayers():
        assert torch.equal(F.conv2d(x, weight), torch.conv2d(x, weight))
        assert torch.equal(F.conv2d(x[0], weight, bias), torch.conv2d(x[0], weight, bias))
        assert torch.equal(F.conv2d(x, weight, bias, padding="same"), torch.conv2d(x, weight, bias, padding="same"))
        assert F.linear(torch.randn(2, 3, 700), torch.randn(100, 700)).shape == (2, 3, 100)


@pytest.mark.parametrize(
    "flatten",
    [lambda x: x.flatten(1), lambda x: torch.flatten(x, start_dim=1), torch.nn.Flatten()],
    ids=["method", "function", "module"],
)
def test_layers__flattened_features_get_gradients_in_their_own_layout(flatten, monkeypatch) -> None:
    torch.manual_seed(0)
    calls = applied(monkeypatch, "_Flat")
    x = channels_last(torch.randn(4, 6, 5, 3))
    compare(lambda x: flatten(x.relu()) ** 2, x)
    assert len(calls) == 1  # only within the context
    seen: list[Tensor] = []
    with SingleClientLayers():
        features = x.requires_grad_() * 1.0
        features.register_hook(seen.append)
        flatten(features).sum().backward()
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_layers__other_flattenings_are_torchs(monkeypatch) -> None:
    calls = applied(monkeypatch, "_Flat")
    x = channels_last(torch.randn(4, 6, 5, 3))
    with SingleClientLayers():
        assert x.flatten().shape == (360,)
        assert x.flatten(2).shape == (4, 6, 15)
        assert torch.flatten(x, end_dim=1).shape == (24, 5, 3)
        assert x.contiguous().flatten(1).shape == (4, 90)
        assert x[0].flatten(1).shape == (6, 15)
    assert not calls
