"""The page's figures on correlated noise are those of the tool that it names."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "noise_kinds.py"))
PAGE = (ROOT / "papers" / "beyond" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("setting", [setting for setting in TOOL["SETTINGS"] if setting[1] <= 300][:2], ids=str)
def test_noise_kinds__page_has_the_tools_first_rows(setting: tuple[object, ...], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path))
    assert f"\n{TOOL['row'](*setting)}\n" in PAGE


@pytest.mark.long
def test_noise_kinds__page_has_the_tools_table(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path))
    TOOL["main"]()
    assert capsys.readouterr().out.strip() in PAGE
