from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from archives import members

from aitune_core import CheckpointError, CheckpointFormatError, CheckpointIntegrityError
from aitune_core._archive import (
    check_members,
    describe_file,
    extract,
    opened,
    read_manifest,
    write_archive,
)

LISTED = {"a/b.bin": {"size_bytes": 3, "sha256": ""}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.bin"
    file.write_bytes(b"abc")
    return file


def test_archive_round_trip(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "m.ait"
    write_archive(target, {"x": [1, None]}, {"a/b.bin": source})
    entry = describe_file(source)
    assert entry["size_bytes"] == 3
    with opened(target) as archive:
        assert read_manifest(archive) == {"x": [1, None]}
        check_members(archive, {"a/b.bin": entry})
        extract(archive, "a/b.bin", entry, tmp_path / "out" / "b.bin")
    assert (tmp_path / "out" / "b.bin").read_bytes() == b"abc"


def test_archive_is_the_same_for_the_same_content(tmp_path: Path, source: Path) -> None:
    for name in ("one", "two"):
        write_archive(tmp_path / name, {"b": 1, "a": 2}, {"a/b.bin": source})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_archive_has_the_permissions_of_a_new_file(tmp_path: Path, source: Path) -> None:
    write_archive(tmp_path / "m.ait", {}, {"a": source})
    (tmp_path / "plain").write_text("")
    mode = (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "m.ait").stat().st_mode == mode


@pytest.mark.parametrize("manifest", [{"x": float("nan")}, {"x": {1, 2}}, {"x": object()}])
def test_manifest_that_is_no_json_is_a_checkpoint_error(
    tmp_path: Path, manifest: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError):
        write_archive(tmp_path / "m.ait", manifest, {})
    assert list(tmp_path.iterdir()) == []


def test_failing_write_leaves_target_and_folder_as_they_were(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.ait"
    write_archive(target, {"x": 1}, {"a": source})
    before = target.read_bytes()

    def fail(_descriptor: int) -> None:
        msg = "disk full"
        raise OSError(msg)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError) as caught:
        write_archive(target, {"x": 2}, {"a": source})
    assert caught.value.path == str(target)
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.ait", "source.bin"]


@pytest.mark.parametrize("target", ["no/such/folder/m.ait", "."])
def test_target_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path, target: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        write_archive(tmp_path / target, {}, {})
    assert caught.value.path == str(tmp_path / target)
    assert list(tmp_path.iterdir()) == []


def test_missing_source_is_a_checkpoint_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        write_archive(tmp_path / "m.ait", {}, {"a": tmp_path / "missing"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_path_that_is_no_file_is_a_checkpoint_error(tmp_path: Path, what: str) -> None:
    path = tmp_path / "missing" if what == "missing" else tmp_path
    with pytest.raises(CheckpointError) as caught, opened(path):
        pass
    assert caught.value.path == str(path)


def test_long_and_odd_names_can_be_saved(tmp_path: Path, source: Path) -> None:
    target = tmp_path / ("n" * 240 + ".ait")
    write_archive(target, {}, {"ü/é.bin": source})
    assert members(target)["ü/é.bin"] == b"abc"


def test_extraction_overwrites_nothing(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "m.ait"
    write_archive(target, {}, {"a": source})
    existing = tmp_path / "existing"
    existing.write_text("mine")
    with pytest.raises(CheckpointError), opened(target) as archive:
        extract(archive, "a", describe_file(source), existing)
    assert existing.read_text() == "mine"


@pytest.mark.parametrize(
    "entry", [{"size_bytes": 4, "sha256": ""}, {"size_bytes": 3, "sha256": "0" * 64}]
)
def test_extraction_verifies_size_and_hash(
    tmp_path: Path, source: Path, entry: dict[str, Any]
) -> None:
    target = tmp_path / "m.ait"
    write_archive(target, {}, {"a": source})
    with pytest.raises(CheckpointIntegrityError), opened(target) as archive:
        extract(archive, "a", entry, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../a", CheckpointFormatError),
        ("a/../../b", CheckpointFormatError),
        ("/a", CheckpointFormatError),
        ("a\\b", CheckpointFormatError),
        ("c:a", CheckpointFormatError),
        ("a//b", CheckpointFormatError),
        ("a/./b", CheckpointFormatError),
    ],
)
def test_names_that_leave_the_archive_are_refused_even_when_listed(
    tmp_path: Path, name: str, kind: type[CheckpointError]
) -> None:
    path = tmp_path / "m.ait"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
        archive.writestr("manifest.json.sha256", "")
        archive.writestr(name, "abc")
    with pytest.raises(kind), opened(path) as archive:
        check_members(archive, {archive.namelist()[2]: LISTED["a/b.bin"]})
