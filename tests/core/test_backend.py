from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from fakes import AffineBackend, AffineEngine, FakeEngine
from samples import Affine, batches, engine_of, graphs_of, recorded, tuned

from aitune_core import (
    ArtifactReader,
    ArtifactWriter,
    CheckpointError,
    EngineClosedError,
    InputMismatchError,
)

X = torch.ones(2, 4)


def engine() -> FakeEngine:
    return engine_of(tuned(Affine(), batches(2)))


def test_calling_an_engine_checks_its_inputs() -> None:
    built = engine()
    assert torch.equal(built((X,))[0], 2 * X + 3)
    runs = built.runs
    with pytest.raises(InputMismatchError) as caught:
        built((X.double(),))
    assert caught.value.path == "x"
    with pytest.raises(InputMismatchError):
        built(())
    assert built.runs == runs


def test_closing_releases_once() -> None:
    built = engine()
    assert not built.closed
    threads = [threading.Thread(target=built.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    built.close()
    assert built.closed
    assert built.releases == 1


def test_closed_engine_says_what_was_attempted() -> None:
    built = engine()
    built.close()
    with pytest.raises(EngineClosedError) as caught:
        built((X,))
    assert (caught.value.backend_name, caught.value.operation) == ("fake", "run")
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("name", ["a.onnx", "folder/b.bin", "a..b", "x y", "ü"])
def test_files_are_stored_under_relative_names(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    writer = ArtifactWriter()
    writer.add_file(name, source)
    assert writer.files == {name: source}


@pytest.mark.parametrize(
    "name", ["", ".", "/a", "//a", "../a", "a/../b", "a/..", "..", "a\\b", "c:a", "c:/a"]
)
def test_names_that_leave_the_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    writer = ArtifactWriter()
    with pytest.raises(CheckpointError) as caught:
        writer.add_file(name, source)
    assert caught.value.path == name
    assert writer.files == {}


def test_spellings_of_one_name_are_one_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    writer = ArtifactWriter()
    writer.add_file("a/b", source)
    for name in ("a/b", "a//b", "./a/b", "a/./b"):
        with pytest.raises(CheckpointError):
            writer.add_file(name, source)
    assert list(writer.files) == ["a/b"]


@pytest.mark.parametrize("missing", ["nothing", "."])
def test_only_files_can_be_stored(tmp_path: Path, missing: str) -> None:
    writer = ArtifactWriter()
    with pytest.raises(CheckpointError) as caught:
        writer.add_file("a", tmp_path / missing)
    assert caught.value.path == "a"


def test_reader_gives_stored_files_only(tmp_path: Path) -> None:
    (tmp_path / "unlisted").write_text("x")
    reader = ArtifactReader(tmp_path, ("a/b",), {"k": 1})
    assert reader.path("a/b") == tmp_path / "a" / "b"
    for name in ("unlisted", "../x", "a"):
        with pytest.raises(CheckpointError) as caught:
            reader.path(name)
        assert (caught.value.path, caught.value.got) == (name, ("a/b",))


def test_engine_is_restored_from_what_it_saved(tmp_path: Path) -> None:
    built = graphs_of(tuned(Affine(4.0, 1.0), batches(2), backend=AffineBackend()))[0].engine
    writer = ArtifactWriter()
    built.save(writer)
    for name, source in writer.files.items():
        target = tmp_path / name
        target.parent.mkdir(parents=True)
        target.write_bytes(source.read_bytes())
    reader = ArtifactReader(tmp_path, tuple(writer.files), writer.data)
    restored = AffineBackend().load(reader, built.graph, built.device)
    assert isinstance(restored, AffineEngine)
    assert torch.equal(restored((X,))[0], built((X,))[0])


def test_graph_of_an_engine_is_the_recorded_one() -> None:
    (graph,) = recorded(Affine(), (X,))
    built = engine()
    assert built.graph == graph.spec
    assert (built.device, built.backend_name) == (torch.device("cpu"), "fake")
