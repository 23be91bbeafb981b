"""What all tests share: a cache of their own, no network, the real data sets unpacked once per session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is first imported: no test reaches for the network

REAL_DATA = Path(__file__).resolve().parents[1] / "../shared/data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of minutes are for `make test-long`: the suite stays under ten minutes."""
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
        patch.setenv("FEDBLUR_TIMING", "off")  # runs that are compared bit for bit must not depend on how busy we are
        yield folder


@pytest.fixture(scope="session")
def hub_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real data sets in the hub's layout: hub_dir/femnist/train-*.parquet and so on."""
    unpack = REAL_DATA / "unpack.py"
    if not unpack.is_file():
        pytest.skip("the real data sets are not here (../shared/data/unpack.py beside the repository)")
    folder = _shared_folder(tmp_path_factory) / "hub"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            subprocess.run([sys.executable, str(unpack), "hub", str(folder)], check=True, capture_output=True)
            (folder / "done").touch()
    return folder
