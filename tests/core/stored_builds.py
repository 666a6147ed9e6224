"""Builds in the store, and what can happen to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from aitune_core import ArtifactWriter, Engine, GraphSpec, SizeCondition
from aitune_core._builds import BuildStore, _hash
from aitune_core._cache import cache_root
from aitune_core._trees import HOLE
from aitune_core.specs import BatchDim, TensorSpec

ROWS = BatchDim(1, 8, name="rows")
GRAPH = GraphSpec(
    name="graph_0",
    inputs=(TensorSpec(name="input_0", path="x", dtype=torch.float32, shape=(ROWS, 4)),),
    outputs=(TensorSpec(name="output_0", path="out", dtype=torch.float32, shape=(ROWS, 4)),),
    call_structure=(HOLE,),
    result_structure=HOLE,
    mutated_inputs=(),
)


class Stored(Engine):
    def run(self, inputs: Any) -> Any:
        return inputs

    def save(self, artifacts: ArtifactWriter) -> None:
        raise NotImplementedError

    def release(self) -> None:
        pass


def key(number: int) -> str:
    return f"{number:064x}"


def keep(store: BuildStore, number: int, size: int = 100, fill: bytes = b"x") -> Path:
    """Store a build of one file; returns where the engine had it."""
    source = cache_root() / f"source-{number}"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_bytes(fill * size)
    artifacts = ArtifactWriter()
    artifacts.add_file("model/weights.bin", source)
    artifacts.data["rows"] = [1, 2.5, None, "three"]
    engine = Stored(GRAPH, torch.device("cpu"), "fake")
    engine.limit_sizes([SizeCondition("rows != 3")])
    engine.compute_dtype = torch.float16
    with store.locked(key(number), 5):
        store.keep(key(number), engine, artifacts, attempts=("export",), build_seconds=1.5)
    return source


def stored_keys(cache_dir: Path) -> list[int]:
    return sorted(int(path.name, 16) for path in (cache_dir / "builds").glob("[0-9a-f]" * 64))


def aged(cache_dir: Path, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(cache_dir / "builds" / key(number) / "manifest.json", (then, then))


def overwrite(entry: Path) -> None:
    file = entry / "files" / "model" / "weights.bin"
    file.chmod(0o644)
    file.write_bytes(b"y" + file.read_bytes()[1:])


def truncate(entry: Path) -> None:
    file = entry / "files" / "model" / "weights.bin"
    file.chmod(0o644)
    os.truncate(file, 99)


def lose_file(entry: Path) -> None:
    (entry / "files" / "model" / "weights.bin").unlink()


def lose_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def link(entry: Path) -> None:
    file = entry / "files" / "model" / "weights.bin"
    file.rename(entry / "elsewhere")
    file.symlink_to(entry / "elsewhere")


def change_manifest(entry: Path, **changes: Any) -> None:
    path = entry / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.update(changes)
    path.write_text(json.dumps(manifest))


def change_content(entry: Path) -> None:
    content = json.loads((entry / "manifest.json").read_text())["content"]
    change_manifest(entry, content={**content, "data": {}})


def cut_manifest(entry: Path) -> None:
    path = entry / "manifest.json"
    path.write_text(path.read_text()[:-20])


def other_version(entry: Path) -> None:
    change_manifest(entry, format_version=2)


def no_object(entry: Path) -> None:
    (entry / "manifest.json").write_text("[]")


def leave_folder(entry: Path) -> None:
    content = json.loads((entry / "manifest.json").read_text())["content"]
    content["files"] = {"../outside": content["files"]["model/weights.bin"]}
    change_manifest(
        entry,
        content=content,
        sha256=_hash(content),
    )


DAMAGES = (
    overwrite,
    truncate,
    lose_file,
    lose_manifest,
    link,
    change_content,
    cut_manifest,
    other_version,
    no_object,
    leave_folder,
)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
