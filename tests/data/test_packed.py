"""Data sets in the form that travels: the same samples come back, and damage is named."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core.errors import DataError
from fedblur.data import packed
from fedblur.data.packed import PackedFolder, export, packed_folder
from fedblur.data.source import Split, Stored


def _stored(samples: int = 50, channels: int = 3) -> Stored:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (samples, channels, 8, 6), generator=generator, dtype=torch.uint8)
    split = Split(x, torch.arange(samples) % 7, torch.arange(samples) // 5)
    return Stored({"train": split, "test": Split(x[:9], split.y[:9], None)}, 7)


@pytest.mark.parametrize("channels", [1, 3])
def test_packed__the_same_samples_come_back(tmp_path: Path, channels: int) -> None:
    stored = _stored(channels=channels)
    export(stored, tmp_path / "femnist")
    again = PackedFolder(tmp_path / "femnist").read()
    assert again.classes == 7
    assert list(again.splits) == ["train", "test"]
    for name, split in stored.splits.items():
        assert torch.equal(again.splits[name].x, split.x)
        assert torch.equal(again.splits[name].y, split.y)
    assert torch.equal(again.splits["train"].writers, stored.splits["train"].writers)
    assert again.splits["test"].writers is None


def test_packed__large_splits_come_in_parts_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_PART_BYTES", 1000)
    written = export(_stored(), tmp_path)
    assert len(written) > 5
    assert torch.equal(PackedFolder(tmp_path).read().splits["train"].x, _stored().splits["train"].x)
    written[1].unlink()
    with pytest.raises(DataError, match="of the train samples; copy the others too"):
        PackedFolder(tmp_path).read()


def test_packed__a_damaged_part_is_named(tmp_path: Path) -> None:
    path = export(_stored(), tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="is damaged"):
        PackedFolder(tmp_path).read()


def test_packed__a_part_is_not_decompressed_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(_stored(), tmp_path)[0]
    path.write_bytes(lzma.compress(bytes(2**22)))
    monkeypatch.setattr(packed, "_MOST", 2**20)
    with pytest.raises(DataError, match=f"{path.name} is damaged .*more than 1,048,576 bytes"):
        PackedFolder(tmp_path).read()


def test_packed__an_old_export_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_PART_BYTES", 1000)
    export(_stored(), tmp_path)
    monkeypatch.undo()
    export(_stored(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_export__is_read_by_the_data_set_of_its_name(tmp_path: Path) -> None:
    stored = _stored(channels=1)
    export(stored, tmp_path / "here" / "mnist")
    result = CliRunner().invoke(
        app, ["data", "export", "mnist", str(tmp_path / "there"), "--data-dir", str(tmp_path / "here")]
    )
    assert result.exit_code == 0, result.output
    source = packed_folder("mnist", tmp_path / "there")
    assert source is not None
    assert torch.equal(source.read().splits["train"].x, stored.splits["train"].x)


def test_export__of_built_in_data_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", "export", "digits", str(tmp_path)])
    assert result.exit_code == 2
    assert "there is nothing to export: digits is built in" in result.stderr
