"""What a checkpoint holds of an engine, looked at before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from aitune_backend_onnxruntime.config import ONNXExecutionProvider, ONNXRuntimeBackendConfig
from aitune_backend_onnxruntime.engine import ExportedModel, RewrittenModel
from aitune_backend_onnxruntime.engine_tables import Copies
from aitune_backend_onnxruntime.errors import OnnxExportError
from aitune_backend_onnxruntime.graph_setup import checked_sizes
from aitune_backend_onnxruntime.model_file import ModelFileError, trusted_path
from aitune_backend_onnxruntime.session import check_model
from aitune_core.errors import CheckpointError, CheckpointFormatError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from aitune_backend_onnxruntime.model_file import ModelFacts
    from aitune_core.backend import ArtifactReader
    from aitune_core.specs import GraphSpec

__all__ = ["StoredEngine", "read_stored"]

_ENTRIES: Final = frozenset(
    {
        "model",
        "rewritten",
        "channels_last",
        "exporter",
        "opset",
        "provider",
        "options",
        "graph_sizes",
        "copies",
    }
)
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "model": (str,),
    "rewritten": (str, type(None)),
    "channels_last": (bool,),
    "options": (dict,),
}


@attrs.frozen
class StoredEngine:
    """A stored engine.

    Attributes:
        model: Its model.
        provider: What executed it.
        graph_sizes: Sizes of the dims for which it had CUDA graphs.
        copies: What it copied between devices; None where that is not known.
    """

    model: ExportedModel
    provider: ONNXExecutionProvider
    graph_sizes: list[dict[str, int]]
    copies: tuple[Copies, ...] | None


def read_stored(artifacts: ArtifactReader, graph: GraphSpec) -> StoredEngine:
    """Take the stored data apart; anything unknown is refused.

    Raises:
        CheckpointError: The stored data cannot be used, or must not be trusted.
    """
    data = dict(artifacts.data)
    if set(data) != _ENTRIES:
        msg = f"the stored data has entries {sorted(data)}, expected {sorted(_ENTRIES)}"
        raise CheckpointFormatError(msg, expected=sorted(_ENTRIES), got=sorted(data))
    for name, kinds in _TYPES.items():
        if not isinstance(data[name], kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            msg = f"the stored {name!r} is {data[name]!r}, expected {expected}"
            raise CheckpointFormatError(msg, expected=expected, got=data[name])
    options, provider = _settings(data)
    path = artifacts.path(data["model"])
    model = ExportedModel(
        path=path,
        facts=_trusted(path, artifacts, graph),
        exporter=data["exporter"],
        options=options,
        channels_last=data["channels_last"],
    )
    if data["rewritten"] is not None:
        path = artifacts.path(data["rewritten"])
        rewritten = RewrittenModel(path, _trusted(path, artifacts, graph))
        model = attrs.evolve(model, rewritten=rewritten, uses_rewritten=True)
    return StoredEngine(model, provider, checked_sizes(data["graph_sizes"], graph), _copies(data))


def _copies(data: dict[str, Any]) -> tuple[Copies, ...] | None:
    stored = data["copies"]
    if stored is None:
        return None
    kinds = (str, str, int)
    for entry in stored if isinstance(stored, list) else [stored]:
        if not isinstance(entry, list) or tuple(map(type, entry)) != kinds:
            expected = "a list of direction, part and count"
            msg = f"stored copies between devices are {entry!r}, expected {expected}"
            raise CheckpointFormatError(msg, expected=expected, got=entry)
    return tuple(Copies(*entry) for entry in stored)


def _settings(data: dict[str, Any]) -> tuple[dict[str, Any], ONNXExecutionProvider]:
    try:
        checked = ONNXRuntimeBackendConfig.from_options(data["options"])
        provider = ONNXRuntimeBackendConfig(execution_provider=data["provider"]).execution_provider
    except ConfigError as error:
        msg = f"the stored options cannot be used: {error}"
        raise CheckpointFormatError(msg, expected=error.allowed, got=error.value) from error
    exporter = data["exporter"]
    if provider is None or exporter not in {"dynamo", "tracer"}:
        msg = f"the stored provider or exporter is unknown: {data['provider']!r}, {exporter!r}"
        raise CheckpointFormatError(msg, got=(data["provider"], exporter))
    return checked.to_options(), provider


def _trusted(path: Path, artifacts: ArtifactReader, graph: GraphSpec) -> ModelFacts:
    files = {name: artifacts.path(name) for name in artifacts.files}
    try:
        facts = trusted_path(path, files)
        check_model(facts, graph)
    except (ModelFileError, OnnxExportError) as error:
        msg = f"the stored ONNX model cannot be used: {error}"
        raise CheckpointError(msg, path=str(path)) from error
    return facts
