"""The hub's layout and the cache, on small folders that are written here."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from fedblur.core.errors import ConfigError, DataError
from fedblur.core.files import cache_folder
from fedblur.data import hub
from fedblur.data.cifar10 import Cifar10
from fedblur.data.federation import load_federation
from fedblur.data.femnist import Femnist
from fedblur.data.mnist import Mnist


def png(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return {"bytes": out.getvalue(), "path": None}


def write_split(folder: Path, split: str, columns: dict[str, Any]) -> None:
    """One parquet file as the hub has it; 2-D and 3-D arrays become images."""
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    table, kinds = {}, {}
    for name, values in columns.items():
        images = name in ("image", "img")
        table[name] = [png(value) for value in values] if images else list(values)
        kinds[name] = datasets.Image() if images else datasets.Value("string" if name == "writer_id" else "int64")
    with hub._quiet(datasets):
        rows = datasets.Dataset.from_dict(table, features=datasets.Features(kinds))
        rows.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))


def grey(count: int, background: int = 0, size: int = 28) -> NDArray[np.uint8]:
    images = np.full((count, size, size), background, dtype=np.uint8)
    images[:, 10:14, 10:14] = 255 - background
    images[:, 12, 12] = np.arange(count) % 256
    return images


def small_mnist(folder: Path, writers: bool, count: int = 40) -> Path:
    for split in ("train", "test"):
        columns: dict[str, Any] = {"image": grey(count), "label": np.arange(count) % 10}
        if writers:
            columns["writer_id"] = [f"w{index // 4}" for index in range(count)]
        write_split(folder / "mnist", split, columns)
    return folder


def small_femnist(folder: Path, sizes: list[int], background: int = 255) -> Path:
    people = [f"f{person:04d}" for person, size in enumerate(sizes) for _ in range(size)]
    count = len(people)
    columns = {"image": grey(count, background), "character": np.arange(count) % 62, "writer_id": people}
    write_split(folder / "femnist", "train", columns)
    return folder


def test_hub__columns_become_bytes_with_channels_first(tmp_path: Path) -> None:
    for split in ("train", "test"):
        colours = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
        write_split(tmp_path / "cifar10", split, {"img": colours, "label": np.arange(30) % 10})
    raw = Cifar10().load(tmp_path)
    assert raw.train.x.dtype == torch.uint8
    assert torch.equal(raw.train.x, torch.from_numpy(colours).permute(0, 3, 1, 2))
    assert raw.train.x.is_contiguous()
    assert raw.train.y.dtype == torch.int64
    assert (raw.owners, raw.classes) == (None, 10)


def test_mnist__writers_are_natural_clients_where_they_are_known(tmp_path: Path) -> None:
    natural = load_federation("mnist", data_dir=small_mnist(tmp_path / "a", writers=True))
    assert natural.train.clients + natural.validation_clients == 10
    assert natural.note == ""
    made_up = load_federation("mnist", clients=8, data_dir=small_mnist(tmp_path / "b", writers=False))
    assert made_up.train.clients == 8
    assert made_up.note == "synthetic users, not writers"


def test_classes__are_those_of_the_data_set_not_of_the_labels_that_are_there(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_split(tmp_path / "mnist", split, {"image": grey(20), "label": np.arange(20) % 4})
        write_split(tmp_path / "cifar10", split, {"img": np.zeros((9, 32, 32, 3), np.uint8), "label": range(9)})
    few = {"image": grey(20, 255), "character": np.arange(20) % 4, "writer_id": ["f0"] * 20}
    write_split(tmp_path / "femnist", "train", few)
    known = [Mnist(), Cifar10(), Femnist()]
    assert [part.load(tmp_path).classes for part in known] == [10, 10, 62]
    assert [part.source(tmp_path).read().classes for part in known] == [10, 10, 62]  # what an export says


def test_classes__a_label_beyond_them_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_split(tmp_path / "mnist", split, {"image": grey(11), "label": range(11)})
    with pytest.raises(DataError, match=r"the train labels are not all in 0\.\.9"):
        Mnist().load(tmp_path)


def test_mnist__one_split_only_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path / "mnist", "train", {"image": grey(5), "label": range(5)})
    with pytest.raises(DataError, match=r"mnist has only 'train' samples here; it needs .* test-\*\.parquet"):
        Mnist().load(tmp_path)


def test_femnist__small_writers_are_dropped_and_a_share_of_each_is_held_out(tmp_path: Path) -> None:
    folder = small_femnist(tmp_path, [30, 19, 20, 55])
    raw = Femnist().load(folder)
    assert raw.owners is not None
    assert torch.bincount(raw.owners).tolist() == [27, 18, 50]
    assert len(raw.test) == 3 + 2 + 5
    assert raw.note == "writers with at least 20 images, 10% of each writer's images held out for test"
    everyone = Femnist(min_samples=1, test_share=0.5).load(folder)
    assert everyone.owners is not None
    assert torch.bincount(everyone.owners).tolist() == [15, 10, 10, 28]


@pytest.mark.parametrize("background", [0, 255])
def test_femnist__background_is_0_and_ink_is_bright(background: int, tmp_path: Path) -> None:
    raw = Femnist().load(small_femnist(tmp_path, [30], background))
    for samples in (raw.train, raw.test):
        assert (samples.x[:, 0, 0] == 0).all()
        assert (samples.x[:, 0, 11, 11] == 255).all()


def test_femnist__each_image_is_turned_for_itself(tmp_path: Path) -> None:
    """One client's images must not decide how another's are read."""
    images = np.concatenate([grey(20), grey(3, 255)])
    people = ["dark"] * 20 + ["bright"] * 3
    write_split(tmp_path / "femnist", "train", {"image": images, "character": range(23), "writer_id": people})
    raw = Femnist(min_samples=1, test_share=0.4).load(tmp_path)
    for samples in (raw.train, raw.test):
        assert (samples.x[:, 0, 0] == 0).all()
        assert (samples.x[:, 0, 11, 11] == 255).all()


def test_femnist__bad_settings_and_data_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="min_samples=0 must be at least 1"):
        Femnist(min_samples=0)
    with pytest.raises(ConfigError, match="test_share=0 must be in"):
        Femnist(test_share=0)
    with pytest.raises(DataError, match="min_samples=50 leaves no writer; the largest has 30 images"):
        Femnist(min_samples=50).load(small_femnist(tmp_path / "a", [30]))
    with pytest.raises(DataError, match=r"test_share=0\.01 of 30 samples leaves no test samples"):
        Femnist(test_share=0.01).load(tmp_path / "a")
    write_split(tmp_path / "b" / "femnist", "train", {"image": grey(3), "character": range(3)})
    with pytest.raises(DataError, match="without a writer_id column"):
        Femnist().load(tmp_path / "b")


def test_hub__folders_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_split(tmp_path / "a" / "mnist", split, {"image": grey(3), "digit": range(3)})
    with pytest.raises(DataError, match=r"found columns \['image', 'digit'\], but none is label or character"):
        Mnist().load(tmp_path / "a")
    write_split(tmp_path / "b" / "mnist", "validation", {"image": grey(3), "label": range(3)})
    with pytest.raises(DataError, match=r"found splits \['validation'\]"):
        Mnist().load(tmp_path / "b")
    uneven = [grey(1)[0], grey(1, size=20)[0]]
    write_split(tmp_path / "c" / "mnist", "train", {"image": uneven, "label": range(2)})
    with pytest.raises(DataError, match="the images differ in size"):
        Mnist().load(tmp_path / "c")
    (tmp_path / "d" / "mnist").mkdir(parents=True)
    (tmp_path / "d" / "mnist" / "train-0.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot be read as parquet") as caught:
        Mnist().load(tmp_path / "d")
    assert "\n" not in str(caught.value)


def test_cache__second_load_reads_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_mnist(tmp_path, writers=True)
    assert Mnist().place(folder) == "in the data dir"
    first = Mnist().load(folder)
    assert Mnist().place(folder) == "cached"
    monkeypatch.setattr(hub, "_library", lambda: pytest.fail("read again"))
    again = Mnist().load(folder)
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.y, again.test.y)
    assert first.owners is not None
    assert again.owners is not None
    assert torch.equal(first.owners, again.owners)


def test_cache__other_settings_share_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    folder = small_femnist(tmp_path, [30, 40])
    Femnist().load(folder)
    Femnist(min_samples=35, test_share=0.2).load(folder)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1


def test_cache__a_changed_source_is_read_again(tmp_path: Path) -> None:
    assert len(Mnist().load(small_mnist(tmp_path, writers=False, count=40)).train) == 40
    assert len(Mnist().load(small_mnist(tmp_path, writers=False, count=50)).train) == 50


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_cache__an_unreadable_file_is_rebuilt(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    folder = small_mnist(tmp_path, writers=False)
    Mnist().load(folder)
    (file,) = (tmp_path / "cache").glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(content or whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="its content is not what was written"):
        assert len(Mnist().load(folder).train) == 40
    assert file.stat().st_size == len(whole)
    monkeypatch.setattr(hub, "_library", lambda: pytest.fail("read again"))
    assert len(Mnist().load(folder).train) == 40


def test_images__whose_header_promises_too_many_pixels_are_not_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    pixels = np.zeros((2, 5000, 5000), dtype=np.uint8)
    write_split(tmp_path / "mnist", "train", {"image": pixels, "label": [0, 1]})
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decompressed"))
    with pytest.raises(DataError, match="5000 x 5000 pixels; 262,144 is the limit"):
        Mnist().load(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
def test_cache__samples_that_others_planted_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    folder = small_mnist(tmp_path, writers=False)
    right = Mnist().load(folder).train.x
    (file,) = (tmp_path / "cache").glob("*.safetensors")
    with safe_open(file, framework="pt") as stored:
        tensors, about = {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata()  # noqa: SIM118
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, file, metadata=about)
    with pytest.warns(UserWarning, match="its content is not what was written"):
        assert torch.equal(Mnist().load(folder).train.x, right)
    file.with_name(f"{file.name}.sha256").unlink()
    file.chmod(0o666)
    with pytest.warns(UserWarning, match="others may write to it"):
        assert torch.equal(Mnist().load(folder).train.x, right)


def test_cache__a_folder_that_cannot_be_written_only_costs_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "file" / "cache"))
    folder = small_mnist(tmp_path, writers=False)
    assert len(Mnist().load(folder).train) == 40
    assert Mnist().place(folder) == "in the data dir"


def test_cache__lies_in_the_platforms_cache_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDBLUR_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/fedblur")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/fedblur")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path("/home/me/Library/Caches/fedblur")


def test_data_dir__comes_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBLUR_DATA", str(small_mnist(tmp_path, writers=False)))
    assert len(Mnist().load(None).train) == 40


def test_data_dir__that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*nowhere' is not a folder"):
        Mnist().load(tmp_path / "nowhere")


@pytest.mark.parametrize("dataset", [Femnist(), Cifar10(), Mnist()], ids=lambda d: d.part_name)
def test_hub__missing_data_say_how_to_get_them(dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants  # the package does not always have it by itself

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", away)
    assert dataset.place(tmp_path) == "needs fetch"
    with pytest.raises(DataError, match=r"\(Name or service not known\)") as caught:
        dataset.load(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for hint in ("data_dir=DIR", "FEDBLUR_DATA=DIR", f"fedblur data fetch {dataset.part_name}"):
        assert hint in message


def test_hub__offline_by_wish_is_one_line_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mnist is not in a data dir and could not be fetched"):
        Mnist().load(tmp_path)


def test_hub__fetched_data_are_packed_under_the_hubs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the network: the library is asked for the hub's name and given a folder."""
    import datasets

    folder, load, asked = small_mnist(tmp_path, writers=False), datasets.load_dataset, []

    def from_hub(name: str, **_: Any) -> Any:
        asked.append(name)
        return load(str(folder / "mnist"), cache_dir=str(tmp_path / "scratch"))

    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    assert len(Mnist().load(None).train) == len(Mnist().load(None).train) == 40
    assert asked == ["ylecun/mnist"]
    assert Mnist().place(None) == "cached"


def test_hub__without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_mnist(tmp_path, writers=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"need datasets: pip install 'fedblur\[data\]'"):
        Mnist().load(folder)


def test_hub__the_library_stays_quiet_and_its_settings_come_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import datasets

    level, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    folder = small_mnist(tmp_path, writers=False)
    capfd.readouterr()
    Mnist().load(folder)
    assert "".join(capfd.readouterr()) == ""
    assert (datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()) == (level, bars)


def test_data__list_works_without_the_optional_libraries() -> None:
    """Only loading images needs the extra."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['datasets', 'PIL', 'huggingface_hub']));"
        "from fedblur.cli.data import app; app(['list'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "needs fetch" in done.stdout
