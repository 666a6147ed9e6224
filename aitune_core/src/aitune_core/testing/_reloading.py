"""Stored engines that another process loads and runs: ``python -m`` this, with a folder."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aitune_core._spec_json import graph_from_json, graph_to_json
from aitune_core.backend import ArtifactReader, ArtifactWriter, Backend, Engine

__all__ = ["outputs_of_another_process", "stored"]

_FILES = "files"
_SECONDS = 300


def stored(engine: Engine, folder: Path) -> ArtifactReader:
    """Save an engine into a folder of its own, as a checkpoint does, data through JSON."""
    writer = ArtifactWriter()
    engine.save(writer)
    for name, source in writer.files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    data = json.loads(json.dumps(writer.data, allow_nan=False))
    return ArtifactReader(folder, tuple(writer.files), data)


def outputs_of_another_process(
    backend: Backend, engine: Engine, inputs: Sequence[Tensor], folder: Path
) -> list[Tensor]:
    """Return what a new process computes that loads the engine from files.

    Raises:
        RuntimeError: It fails; the error holds what it printed.
        Exception: Saving fails, in whatever way.
    """
    reader = stored(engine, folder / _FILES)
    kind = type(backend)
    order = {
        "module": kind.__module__,
        "class": kind.__qualname__,
        "source": inspect.getfile(kind),
        "options": backend.config.to_options(),
        "graph": graph_to_json(engine.graph),
        "device": str(engine.device),
        "files": reader.files,
        "data": dict(reader.data),
    }
    (folder / "order.json").write_text(json.dumps(order, allow_nan=False))
    torch.save([tensor.cpu() for tensor in inputs], folder / "inputs.pt")
    result = subprocess.run(  # noqa: S603 - this Python, this file
        [sys.executable, "-m", __name__, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if result.returncode != 0:
        msg = f"the new process ended with {result.returncode}:\n{result.stderr[-3000:]}"
        raise RuntimeError(msg)
    outputs: list[Tensor] = torch.load(folder / "outputs.pt", weights_only=True)
    return [tensor.to(engine.device) for tensor in outputs]


def _backend_class(order: dict[str, Any]) -> Any:  # noqa: ANN401
    name = order["module"]
    try:
        found: Any = importlib.import_module(name)
    except ImportError:  # a test's own module, which pytest imported by its file
        spec = importlib.util.spec_from_file_location(name, order["source"])
        if spec is None or spec.loader is None:
            raise
        found = importlib.util.module_from_spec(spec)
        sys.modules[name] = found
        spec.loader.exec_module(found)
    for part in order["class"].split("."):
        found = getattr(found, part)
    return found


def _main(folder: Path) -> None:
    order = json.loads((folder / "order.json").read_text())
    backend_class = _backend_class(order)
    backend = backend_class(backend_class.config_class.from_options(order["options"]))
    device = torch.device(order["device"])
    reader = ArtifactReader(folder / _FILES, tuple(order["files"]), order["data"])
    engine = backend.load(reader, graph_from_json(order["graph"]), device)
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    outputs = engine([tensor.to(device) for tensor in inputs])
    torch.save([output.cpu() for output in outputs], folder / "outputs.pt")
    engine.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
