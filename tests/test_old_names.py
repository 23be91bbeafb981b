"""What users' files import by the names of version 0.2 is still there: plugins, deployed apps, notebooks."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedblur.core.old_names import RENAMED

SOMEWHERE_BELOW = {"engines.flower": "client", "methods": "base", "models": "base", "mechanisms": "base"}


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_old_name__is_the_same_module(old: str) -> None:
    new = importlib.import_module(f"fedblur.{RENAMED[old]}")
    assert importlib.import_module(f"fedblur.{old}") is new
    assert new.__spec__ is not None
    assert new.__spec__.name == new.__name__ == f"fedblur.{RENAMED[old]}"
    if old in SOMEWHERE_BELOW:
        below = SOMEWHERE_BELOW[old]
        assert importlib.import_module(f"fedblur.{old}.{below}") is importlib.import_module(f"{new.__name__}.{below}")


def test_old_names__work_in_a_new_process_and_first() -> None:
    code = (
        "from fedblur.engines.flower.client import client_app\n"
        "from fedblur.engines.flower.settings import Deployment\n"
        "from fedblur.methods import Method\n"
        "from fedblur.models.base import Model\n"
        "from fedblur.registry import register\n"
        "import fedblur, fedblur.flower.client, fedblur.core.registry\n"
        "assert client_app is fedblur.flower.client.client_app\n"
        "assert Method is fedblur.Method and register is fedblur.register\n"
        "assert callable(fedblur.train)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_old_names__what_never_was_there_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="fedblur.nothing"):
        importlib.import_module("fedblur.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fedblur.methods.nothing")


def test_decision__lists_new_names_that_are_there_and_agree() -> None:
    page = Path(__file__).resolve().parents[1] / "docs/decisions/0110-twelve-rooms.md"
    rows = re.findall(r"\| (`[\w.]+`(?:, `\w+`)*) \| `([\w.]+)` (?=\|)", page.read_text(encoding="utf-8"))
    assert len(rows) > 25
    for olds, new in rows:
        importlib.import_module(f"fedblur.{new}")
        for old in re.findall(r"`(.+?)`", olds):
            assert RENAMED.get(old, new) == new
