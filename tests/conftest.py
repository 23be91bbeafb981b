"""What all tests share: a cache of their own, no network, the real data sets unpacked once per session."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is first imported: no test reaches for the network

REAL_DATA = Path(__file__).resolve().parents[1] / "../shared/data"


_NUMBERS = itertools.count()
SLOW = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what slow.txt names; tests of minutes are for `make test-long`."""
    slow = {line for line in SLOW.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
    for item in items:
        file = item.nodeid.partition("::")[0]
        if {item.nodeid.partition("[")[0], file} & slow:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("xdist_group") is None:  # a file's tests share a process, and so its fixtures
            item.add_marker(pytest.mark.xdist_group(file))
        if config.getoption("loadgroup", False) and hasattr(item, "_id"):
            # xdist 3.8 writes the group where pytest 9.2 no longer looks, and deals tests out one by one (pytest-xdist
            # issue 1386): each process would run the fixtures of nearly every file.
            group = item.get_closest_marker("xdist_group").args[0]
            item._id = type(item._id).parse(f"{item.nodeid}@{group}")
    if os.environ.get("FEDBLUR_LONG") == "1":
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: make test-long runs it"))


def _shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The session's folder that all xdist workers see."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests neither read nor fill the user's cache and data folder."""
    folder = _shared_folder(tmp_path_factory) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDBLUR_CACHE", str(folder))
        patch.delenv("FEDBLUR_DATA", raising=False)
        patch.setenv("FEDBLUR_POPULATIONS", str(folder.with_name("populations")))  # each test has one of its own
        patch.setenv("FEDBLUR_TIMING", "off")  # runs that are compared bit for bit must not depend on how busy we are
        yield folder


@pytest.fixture(autouse=True)
def own_populations(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test, and no process that it starts, writes into the user's populations."""
    folder = tmp_path_factory.getbasetemp() / "populations" / str(next(_NUMBERS))  # made when something is written
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(folder))
    return folder


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpack a real data set in the hub's layout, FOLDER/mnist/train-*.parquet and so on, and return FOLDER."""
    script, folder = REAL_DATA / "unpack.py", _shared_folder(tmp_path_factory) / "hub"

    def unpack(name: str) -> Path:
        if not script.is_file():
            pytest.skip("the real data sets are not here (../shared/data/unpack.py beside the repository)")
        with FileLock(f"{folder}-{name}.lock"):
            if not (folder / f"{name} is done").exists():
                subprocess.run([sys.executable, str(script), "hub", str(folder), name], check=True, capture_output=True)
                (folder / f"{name} is done").touch()
        return folder

    return unpack
