from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aitune_core import ConfigError
from aitune_core._cache import (
    STALE_SECONDS,
    cache_root,
    new_work_dir,
    remove_stale_work_dirs,
    remove_with,
)


class Owner:
    pass


def test_variable_chooses_the_cache_folder(cache_dir: Path) -> None:
    assert cache_root() == cache_dir


def test_home_is_expanded_and_the_platform_decides_without_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AITUNE_CACHE_DIR", "~/mine")
    assert cache_root() == tmp_path / "mine"
    monkeypatch.setenv("AITUNE_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_root() == tmp_path / "xdg" / "aitune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == tmp_path / ".cache" / "aitune"


def test_asking_for_the_folder_makes_nothing(cache_dir: Path) -> None:
    cache_root()
    assert not cache_dir.exists()


def test_work_folders_are_empty_inside_the_cache_and_never_shared(cache_dir: Path) -> None:
    first, second = new_work_dir("fake", "net"), new_work_dir("fake", "net")
    assert first != second
    for folder in (first, second):
        assert folder.is_relative_to(cache_dir)
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["../../up", "/etc", "a/b", "a\\b", "x" * 300, "ü:*?", "\0", ".."])
def test_names_cannot_leave_the_cache(cache_dir: Path, name: str) -> None:
    folder = new_work_dir(name, name)
    assert folder.is_dir()
    assert folder.resolve().is_relative_to(cache_dir.resolve())


@pytest.mark.skipif(os.name == "nt", reason="needs a path that is a file on POSIX")
def test_unusable_cache_folder_is_a_setting_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AITUNE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError) as caught:
        new_work_dir("fake", "net")
    assert caught.value.field == "AITUNE_CACHE_DIR"
    assert isinstance(caught.value.__cause__, OSError)


def test_folder_goes_with_its_owner() -> None:
    owner, folder = Owner(), new_work_dir("fake", "net")
    (folder / "inside").mkdir()
    (folder / "inside" / "file").write_text("x")
    remove_with(owner, folder)
    assert folder.exists()
    del owner
    gc.collect()
    assert not folder.exists()


def age(path: Path) -> None:
    then = time.time() - STALE_SECONDS - 10
    os.utime(path, (then, then))


LEAVING = """
import os
from aitune_core._cache import new_work_dir, remove_with
class Owner: pass
owner, kept = Owner(), new_work_dir("fake", "kept")
remove_with(owner, kept)
print(kept, new_work_dir("fake", "forgotten"), flush=True)
input()
"""


def test_only_old_folders_of_ended_processes_are_removed(cache_dir: Path) -> None:
    own = new_work_dir("fake", "own")
    named = cache_dir / "fake" / "0123456789abcdef-of-someone"
    named.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folders = [Path(name) for name in process.stdout.readline().split()]
    for folder in (own, named, *folders):
        age(folder)
    remove_stale_work_dirs()
    assert all(folder.exists() for folder in (own, named, *folders))
    process.kill()
    process.communicate()
    os.utime(folders[1])
    remove_stale_work_dirs()
    assert [folder.exists() for folder in (own, named, *folders)] == [True, True, False, True]
    age(folders[1])
    for lock in cache_dir.glob(".owner-*"):
        age(lock)
    remove_stale_work_dirs()
    assert [folder.exists() for folder in (own, named, *folders)] == [True, True, False, False]
    assert len(list(cache_dir.glob(".owner-*"))) == 1


def test_process_that_ends_leaves_no_mark(cache_dir: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVING], check=True, input="\n", text=True)
    assert list(cache_dir.glob(".owner-*")) == []


def test_nothing_is_removed_where_locks_do_not_hold(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_work_dir("fake", "own")
    stale = cache_dir / "fake" / "net-0123456789abcdef-abcdefgh"
    stale.mkdir()
    age(stale)
    with monkeypatch.context() as patch:
        patch.setattr("aitune_core._cache._is_free", lambda path: True)
        remove_stale_work_dirs()
        assert stale.exists()
    remove_stale_work_dirs()
    assert not stale.exists()


def test_folders_are_made_and_never_removed_where_there_are_no_locks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("filelock.FileLock.acquire", refused)
    folder = new_work_dir("fake", "own")
    age(folder)
    remove_stale_work_dirs()
    assert folder.exists()
    owner = Owner()
    remove_with(owner, folder)
    del owner
    gc.collect()
    assert not folder.exists()
