from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from stored_builds import DAMAGES, GRAPH, Stored, aged, keep, key, kill, stored_keys

from aitune_core import ArtifactReader, ArtifactWriter, CheckpointError, ConfigError, SizeCondition
from aitune_core._builds import BuildStore
from aitune_core._cache import STALE_SECONDS


def test_build_comes_back_as_it_was(cache_dir: Path, tmp_path: Path) -> None:
    keep(BuildStore(), 1, fill=b"content")
    found = BuildStore().fetch(key(1), tmp_path / "work")
    assert found is not None
    assert found.graph == attrs.evolve(GRAPH, conditions=(SizeCondition("rows != 3"),))
    assert found.compute_dtype is torch.float16
    assert found.data == {"rows": [1, 2.5, None, "three"]}
    assert (found.attempts, found.build_seconds) == (("export",), 1.5)
    reader = ArtifactReader(tmp_path / "work", found.files, found.data)
    assert reader.path("model/weights.bin").read_bytes() == b"content" * 100


def test_unknown_key_gives_nothing(tmp_path: Path) -> None:
    assert BuildStore().fetch(key(1), tmp_path) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed(damage: Callable[[Path], None], cache_dir: Path, tmp_path: Path) -> None:
    store = BuildStore()
    keep(store, 1)
    damage(cache_dir / "builds" / key(1))
    with pytest.raises((CheckpointError, OSError)):
        store.fetch(key(1), tmp_path / "work")
    with store.locked(key(1), 5):
        store.drop(key(1))
    assert stored_keys(cache_dir) == []
    keep(store, 1)
    assert store.fetch(key(1), tmp_path / "again") is not None


def test_files_in_use_outlive_their_entry(cache_dir: Path, tmp_path: Path) -> None:
    store = BuildStore()
    keep(store, 1).write_bytes(b"the engine goes on to write")
    store.fetch(key(1), tmp_path / "work")
    store.drop(key(1))
    keep(store, 1, fill=b"other")
    assert (tmp_path / "work" / "model" / "weights.bin").read_bytes() == b"x" * 100


def test_files_are_copied_where_there_are_no_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr("os.link", refused)
    store = BuildStore()
    keep(store, 1).write_bytes(b"changed")
    assert store.fetch(key(1), tmp_path / "work") is not None
    assert (tmp_path / "work" / "model" / "weights.bin").read_bytes() == b"x" * 100


def test_least_recently_used_builds_make_room(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("AITUNE_CACHE_MAX_BYTES", "400000")
    store = BuildStore()
    for number in (1, 2, 3):
        keep(store, number, 100_000)
    for number, age in ((1, 300), (2, 200), (3, 100)):
        aged(cache_dir, number, age)
    store.fetch(key(1), tmp_path / "one")
    keep(store, 4, 150_000)
    assert stored_keys(cache_dir) == [1, 3, 4]
    keep(store, 5, 390_000)
    assert stored_keys(cache_dir) == [5]
    assert not (cache_dir / "builds" / f"{key(2)}.lock").exists()


def test_build_that_someone_works_with_is_not_evicted(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    monkeypatch.setenv("AITUNE_CACHE_MAX_BYTES", "250000")
    store = BuildStore()
    keep(store, 1, 100_000)
    keep(store, 2, 100_000)
    aged(cache_dir, 1, 100)
    with store.locked(key(1), 5):
        keep(store, 3, 100_000)
    assert stored_keys(cache_dir) == [1, 3]


def test_what_is_larger_than_the_store_is_refused_and_removes_nothing(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    monkeypatch.setenv("AITUNE_CACHE_MAX_BYTES", "10000")
    store = BuildStore()
    keep(store, 1)
    with pytest.raises(OSError, match="AITUNE_CACHE_MAX_BYTES"):
        keep(store, 2, 20_000)
    assert stored_keys(cache_dir) == [1]


@pytest.mark.parametrize("value", ["-1", "20G", "1.5", "much"])
def test_setting_must_be_bytes(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AITUNE_CACHE_MAX_BYTES", value)
    with pytest.raises(ConfigError) as caught:
        BuildStore()
    assert (caught.value.field, caught.value.value) == ("AITUNE_CACHE_MAX_BYTES", value)


def test_nothing_is_left_where_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        keep(BuildStore(), 1)
    assert list((cache_dir / "builds").iterdir()) == []


def test_data_that_is_no_json_is_refused(cache_dir: Path) -> None:
    artifacts = ArtifactWriter()
    artifacts.data["bad"] = float("nan")
    engine = Stored(GRAPH, torch.device("cpu"), "fake")
    store = BuildStore()
    with pytest.raises(ValueError, match="JSON"), store.locked(key(1), 5):
        store.keep(key(1), engine, artifacts, attempts=(), build_seconds=0.0)
    assert list((cache_dir / "builds").iterdir()) == []


def test_one_waits_for_the_other_and_only_so_long() -> None:
    store, order = BuildStore(), []
    inside = threading.Event()

    def first() -> None:
        with store.locked(key(1), 5):
            inside.set()
            time.sleep(0.3)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(5)
    with pytest.raises(TimeoutError), store.locked(key(1), 0.05):
        pass
    with store.locked(key(2), 0), store.locked(key(1), 5):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_lock_leaves_no_file_without_an_entry(cache_dir: Path) -> None:
    with BuildStore().locked(key(1), 5):
        assert (cache_dir / "builds" / f"{key(1)}.lock").exists()
    assert list((cache_dir / "builds").iterdir()) == []


PRELUDE = """
import sys
sys.path.insert(0, sys.argv[1])
import time
import stored_builds as t
store = t.BuildStore()
print("ready", flush=True)
"""


def started(script: str) -> subprocess.Popen[str]:
    """Start a process and wait until it has imported everything."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_lock_of_a_killed_process_is_free() -> None:
    process = started(
        "with store.locked(t.key(1), 5):\n print('held', flush=True)\n time.sleep(60)"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    store = BuildStore()
    with pytest.raises(TimeoutError), store.locked(key(1), 0.05):
        pass
    kill(process)
    with store.locked(key(1), 2):
        pass


STORING = """
import os, random
for line in sys.stdin:
    child = os.fork()
    if child:
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    for number in range(1000):
        t.keep(store, int(line) + number, 200_000)
        print("kept", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_process_leaves_whole_entries_or_none(cache_dir: Path, tmp_path: Path) -> None:
    process = started(STORING)
    assert process.stdin is not None
    assert process.stdout is not None
    store, moments = BuildStore(), random.Random(0)
    for attempt in range(1, 13):
        process.stdin.write(f"{attempt * 1000}\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "kept\n"
        time.sleep(moments.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        while process.stdout.readline() != "dead\n":
            pass
        found = stored_keys(cache_dir)
        assert found
        for number in found:
            assert store.fetch(key(number), tmp_path / str(number)) is not None
            with store.locked(key(number), 5):
                store.drop(key(number))
    kill(process)


def test_leftovers_are_removed_when_they_are_old(cache_dir: Path) -> None:
    store = BuildStore()
    keep(store, 1)
    builds = cache_dir / "builds"
    for name in (".tmp-old", ".tmp-new"):
        (builds / name / "files").mkdir(parents=True)
    for name in (key(8), key(9)):
        (builds / f"{name}.lock").touch()
    then = time.time() - STALE_SECONDS - 10
    for name in (".tmp-old", f"{key(8)}.lock", f"{key(1)}.lock"):
        os.utime(builds / name, (then, then))
    keep(store, 2)
    assert {path.name for path in builds.iterdir()} == {
        ".tmp-new",
        f"{key(9)}.lock",
        *(key(number) for number in (1, 2)),
        *(f"{key(number)}.lock" for number in (1, 2)),
    }
