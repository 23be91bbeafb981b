"""The cache: only what this user wrote, as it was written. Everything else is made again, with a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fedblur.core import cache_files
from fedblur.core.cache_files import keep, open_kept, own_folder, read_kept

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
NOBODY = 65_534


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "cache" / "file"
    keep(path, b"content")
    return path


def test_kept__is_read_again(kept: Path) -> None:
    assert read_kept(kept) == b"content"
    assert read_kept(kept.with_name("none")) is None
    (kept.parent / "draft").write_bytes(b"more")
    keep(kept, kept.parent / "draft")
    assert read_kept(kept) == b"more"


@posix
def test_kept__folder_and_file_are_this_users_alone(kept: Path) -> None:
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert kept.stat().st_mode & 0o777 == 0o600


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3])


def without_digest(path: Path) -> None:
    path.with_name("file.sha256").unlink()


def writable(path: Path) -> None:
    path.chmod(0o620)


def in_a_shared_folder(path: Path) -> None:
    path.parent.chmod(0o1777)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


PLANTED = {
    truncated: "its content is not what was written",
    without_digest: "no digest of it was recorded",
    writable: "others may write to it",
    in_a_shared_folder: "others may write to it",
    a_link: "it cannot be opened",
    a_pipe: "it is no regular file",
}


@posix
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_kept__what_others_may_have_changed_is_not_used(kept: Path, plant: Callable[[Path], None]) -> None:
    plant(kept)
    with pytest.warns(UserWarning, match=f"is not used: {PLANTED[plant]}"):
        assert read_kept(kept) is None


@posix
@pytest.mark.parametrize("which", ["file", "."])
def test_kept__of_another_user_is_not_used(kept: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(kept.parent / which, NOBODY, NOBODY)
    else:
        monkeypatch.setattr(cache_files, "_trusted", lambda: {0})
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert read_kept(kept) is None


@posix
def test_kept__nothing_is_put_where_others_may_write(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.warns(UserWarning, match="others may write to it"):
        keep(shared / "file", b"content")
    assert list(shared.iterdir()) == []


def test_kept__where_no_folder_can_be_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with warnings.catch_warnings(record=True) as said:
        assert not own_folder(tmp_path / "file" / "cache")
        assert read_kept(tmp_path / "file" / "cache" / "x") is None
    assert said == []


def test_kept__of_an_older_version_is_given_a_digest_where_that_is_allowed(kept: Path) -> None:
    without_digest(kept)
    first = open_kept(kept, adopt=True)
    assert first is not None
    first.close()
    assert read_kept(kept) == b"content"
    truncated(kept)
    with pytest.warns(UserWarning, match="not what was written"):
        assert open_kept(kept, adopt=True) is None
