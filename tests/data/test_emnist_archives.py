"""NIST's own archives: both forms, wrapped and bare, upright images, writers where the form has them."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.io import loadmat, savemat
from typer.testing import CliRunner

from fedblur.cli.data import app
from fedblur.core.errors import ConfigError, DataError
from fedblur.core.registry import build
from fedblur.data import emnist_archives
from fedblur.data.emnist import Emnist
from fedblur.data.emnist_archives import MatArchive
from fedblur.data.federation import load_federation

TRAIN, TEST = 60, 12
FIRST_ROW = 9  # marks the top row of an upright image


def pictures(count: int) -> NDArray[np.uint8]:
    """Upright images whose top row is bright."""
    images = np.random.default_rng(count).integers(0, 5, (count, 28, 28), dtype=np.uint8)
    images[:, 0] = 200 + FIRST_ROW
    return images


def labels(count: int, split: str) -> NDArray[np.uint8]:
    first, classes = (1, 26) if split == "letters" else (0, 10)
    return (first + np.arange(count) % classes).astype(np.uint8)


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(split: str) -> dict[str, bytes]:
    """As in gzip.zip: images are stored transposed."""
    files = {}
    for part, count in (("train", TRAIN), ("test", TEST)):
        files[f"emnist-{split}-{part}-images-idx3-ubyte"] = idx(pictures(count).transpose(0, 2, 1))
        files[f"emnist-{split}-{part}-labels-idx1-ubyte"] = idx(labels(count, split))
    return files


def mat_file(split: str, writers: bool = True) -> bytes:
    """As in matlab.zip: a struct of structs, images as rows in column-major order."""

    def table(count: int) -> dict[str, Any]:
        columns = {
            "images": pictures(count).transpose(0, 2, 1).reshape(count, 784),
            "labels": labels(count, split)[:, None],
        }
        return columns | ({"writers": 100 + np.arange(count)[:, None] // 5} if writers else {})

    out = io.BytesIO()
    savemat(out, {"dataset": {"train": table(TRAIN), "test": table(TEST), "mapping": np.arange(10)}})
    return out.getvalue()


def write_bare(folder: Path, split: str) -> None:
    for name, content in idx_files(split).items():
        (folder / name).write_bytes(content)


def write_gz(folder: Path, split: str) -> None:
    for name, content in idx_files(split).items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))


def write_gzip_zip(folder: Path, split: str) -> None:
    with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
        for name, content in idx_files(split).items():
            archive.writestr(f"gzip/{name}.gz", gzip.compress(content))


def write_mat(folder: Path, split: str) -> None:
    (folder / f"emnist-{split}.mat").write_bytes(mat_file(split))


def write_matlab_zip(folder: Path, split: str) -> None:
    with zipfile.ZipFile(folder / "matlab.zip", "w") as archive:
        archive.writestr(f"matlab/emnist-{split}.mat", mat_file(split))


def write_compressed_mat(folder: Path, split: str) -> None:
    """The official file is of this kind."""
    out = io.BytesIO()
    savemat(out, {"dataset": loadmat(io.BytesIO(mat_file(split)))["dataset"]}, do_compression=True)
    (folder / f"emnist-{split}.mat").write_bytes(out.getvalue())


WRITERS_KNOWN = (write_mat, write_matlab_zip, write_compressed_mat)
FORMS = (write_bare, write_gz, write_gzip_zip, *WRITERS_KNOWN)


@pytest.mark.parametrize("subfolder", ["", "emnist"])
@pytest.mark.parametrize("write", FORMS)
def test_emnist__official_forms_are_read_upright(
    write: Callable[[Path, str], None], subfolder: str, tmp_path: Path
) -> None:
    place = tmp_path / subfolder
    place.mkdir(exist_ok=True)
    write(place, "byclass")
    raw = Emnist().load(tmp_path)
    assert raw.train.x.shape == (TRAIN, 1, 28, 28)
    assert raw.train.x.dtype == torch.uint8
    assert torch.equal(raw.train.x[:, 0], torch.from_numpy(pictures(TRAIN)))
    assert torch.equal(raw.test.x[:, 0], torch.from_numpy(pictures(TEST)))
    assert raw.train.y.tolist() == labels(TRAIN, "byclass").tolist()
    assert raw.classes == 62
    assert raw.note == ""  # both splits are there: nothing was held out
    assert (raw.owners is not None) == (write in WRITERS_KNOWN)


def test_emnist__writers_of_the_matlab_form_are_natural_clients(tmp_path: Path) -> None:
    write_matlab_zip(tmp_path, "byclass")
    federation = load_federation("emnist", "natural", data_dir=tmp_path)
    assert federation.train.clients + federation.validation_clients == TRAIN // 5
    assert federation.note == ""


def test_emnist__without_writers_users_are_called_synthetic(tmp_path: Path) -> None:
    write_gzip_zip(tmp_path, "byclass")
    assert "synthetic users, not writers" in load_federation("emnist", clients=10, data_dir=tmp_path).note
    with pytest.raises(DataError, match="no writers"):
        load_federation("emnist", "natural", data_dir=tmp_path)


def test_emnist__matlab_form_without_writers_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "emnist-byclass.mat").write_bytes(mat_file("byclass", writers=False))
    assert Emnist().load(tmp_path).owners is None


@pytest.mark.parametrize("write", FORMS)
@pytest.mark.parametrize(
    ("split", "classes"), [("bymerge", 47), ("balanced", 47), ("letters", 26), ("digits", 10), ("mnist", 10)]
)
def test_emnist__other_splits_count_classes_from_zero(
    write: Callable[[Path, str], None], split: Any, classes: int, tmp_path: Path
) -> None:
    write(tmp_path, split)
    raw = Emnist(split=split).load(tmp_path)
    assert raw.classes == classes
    assert int(raw.train.y.min()) == 0
    assert int(raw.train.y.max()) < classes
    with pytest.raises(DataError):
        Emnist(split="byclass").load(tmp_path)


def test_emnist__is_packed_after_the_first_load(tmp_path: Path) -> None:
    write_mat(tmp_path, "byclass")
    assert Emnist().place(tmp_path) == "in the data dir"
    first = Emnist().load(tmp_path)
    assert Emnist().place(tmp_path) == "cached"
    again = Emnist().load(tmp_path)
    assert first.owners is not None
    assert again.owners is not None
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.owners, again.owners)


def test_emnist__an_export_reads_what_training_has_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once had a name of its own in the cache, so that the archive was read and packed a second time."""
    write_mat(tmp_path, "byclass")
    Emnist().load(tmp_path)
    monkeypatch.setattr(MatArchive, "read", lambda self: pytest.fail("read a second time"))
    words = ["export", "emnist", str(tmp_path / "out"), "--data-dir", str(tmp_path)]
    CliRunner().invoke(app, words, catch_exceptions=False)
    assert {path.suffix for path in (tmp_path / "out" / "emnist").iterdir()} == {".xz"}


@pytest.mark.parametrize("name", ["gzip.zip", "matlab.zip", "emnist-byclass.mat"])
def test_emnist__a_broken_archive_is_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match=f"{name} is not the EMNIST archive") as caught:
        Emnist().load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [3, 10, 1000])
def test_emnist__an_idx_file_cut_short_is_refused(cut: int, tmp_path: Path) -> None:
    write_bare(tmp_path, "byclass")
    file = tmp_path / "emnist-byclass-train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte is not the EMNIST archive"):
        Emnist().load(tmp_path)


@pytest.mark.parametrize("form", [write_gz, write_gzip_zip])
def test_emnist__an_idx_file_holds_no_more_than_its_header_says(form: Callable[..., None], tmp_path: Path) -> None:
    """A bomb: 64 MB of zeros behind what the header counts."""
    form(tmp_path, "byclass")
    name = "emnist-byclass-train-images-idx3-ubyte"
    bomb = gzip.compress(idx_files("byclass")[name] + bytes(2**26))
    if form is write_gz:
        (tmp_path / f"{name}.gz").write_bytes(bomb)
    else:
        files = {f"gzip/{other}.gz": gzip.compress(content) for other, content in idx_files("byclass").items()}
        with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
            for member, content in (files | {f"gzip/{name}.gz": bomb}).items():
                archive.writestr(member, content)
    with pytest.raises(DataError, match=f"decompresses to more than {TRAIN * 784:,} bytes"):
        Emnist().load(tmp_path)


def test_emnist__a_header_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    write_bare(tmp_path, "byclass")
    file = tmp_path / "emnist-byclass-train-images-idx3-ubyte"
    file.write_bytes(struct.pack(">HBB3I", 0, 8, 3, 2**31, 28, 28))
    with pytest.raises(DataError, match="its header promises more than"):
        Emnist().load(tmp_path)


@pytest.mark.parametrize("bomb", ["in the zip", "in the file"])
def test_emnist__a_matlab_file_is_not_decompressed_without_end(
    bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emnist_archives, "_MOST", 2**20)
    content = bytes(2**22)
    if bomb == "in the file":
        out = io.BytesIO()
        savemat(out, {"dataset": np.zeros(2**22, dtype=np.uint8)}, do_compression=True)
        content = out.getvalue()
        assert len(content) < 2**20
    with zipfile.ZipFile(tmp_path / "matlab.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("matlab/emnist-byclass.mat", content)
    with pytest.raises(DataError, match="matlab.zip .*decompresses to more than"):
        Emnist().load(tmp_path)


def test_emnist__labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_bare(tmp_path, "digits")
    (tmp_path / "emnist-digits-train-labels-idx1-ubyte").write_bytes(idx(np.full(TRAIN, 77, dtype=np.uint8)))
    with pytest.raises(DataError, match="classes 77 to 77"):
        Emnist(split="digits").load(tmp_path)


def test_emnist__missing_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gzip\.zip or matlab\.zip .*data_dir=DIR or FEDBLUR_DATA=DIR"):
        Emnist().load(None)
    assert Emnist().place(tmp_path) == "needs fetch"


def test_emnist__unknown_split_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"split='by_class': input should be 'byclass'"):
        build("dataset", {"name": "emnist", "split": "by_class"})
    with pytest.raises(ConfigError, match=r"test_share=1\.0 must be in"):
        build("dataset", {"name": "emnist", "test_share": 1})
