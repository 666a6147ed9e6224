"""Which graphs an engine has before its first call: those of recorded or stored sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from aitune_backend_onnxruntime.errors import BACKEND_NAME
from aitune_backend_onnxruntime.graphs import GraphRefusedError
from aitune_core.backend import Attempt
from aitune_core.errors import (
    BuildError,
    CheckpointError,
    CheckpointFormatError,
    ValidationError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aitune_backend_onnxruntime.engine import ONNXRuntimeEngine
    from aitune_core.backend import BuildRequest
    from aitune_core.specs import GraphSpec

__all__ = ["capture_recorded", "capture_stored", "checked_sizes"]

#: Graphs captured in advance; each costs some runs, in every `ait.load`, too.
_IN_ADVANCE: Final = 16
_STEP: Final = "CUDA graphs"


def capture_recorded(engine: ONNXRuntimeEngine, request: BuildRequest) -> Attempt:
    """Capture graphs for recorded sizes, and check the engine once more with them.

    Returns:
        A note for the report; where it fails, the engine runs plainly, and the note says why.

    Raises:
        BuildError: It fails, and ``cuda_graphs=True`` asks for graphs.
    """
    try:
        refusals = _captured(engine, _different_sizes(engine.graph, request.samples))
        request.check(engine)
    except (GraphRefusedError, ValidationError) as error:
        if engine.model.options["cuda_graphs"] is True:
            msg = f"cuda_graphs=True, but {error}"
            raise BuildError(msg, backend_name=BACKEND_NAME, step=_STEP) from error
        engine.turn_graphs_off(str(error))
        return Attempt(_STEP, succeeded=False, detail=f"runs without: {error}")
    count = len(engine.graph_sizes)
    detail = f"captured for {count} {'size' if count == 1 else 'sizes'}"
    if refusals:
        detail += f"; not for {len(refusals)}: {refusals[0]}"
    return Attempt(_STEP, succeeded=True, detail=detail)


def capture_stored(engine: ONNXRuntimeEngine, sizes: Sequence[dict[str, int]]) -> None:
    """Capture graphs for the sizes that a loaded engine was stored with.

    Raises:
        CheckpointError: It fails, and ``cuda_graphs=True`` asks for graphs.
    """
    try:
        _captured(engine, [_zeros(engine.graph, one, engine.device) for one in sizes])
    except GraphRefusedError as error:
        if engine.model.options["cuda_graphs"] is True:
            msg = f"the engine was stored with cuda_graphs=True, but here {error}"
            raise CheckpointError(msg) from error
        engine.turn_graphs_off(str(error))


def _captured(
    engine: ONNXRuntimeEngine, calls: Sequence[tuple[Tensor, ...]]
) -> list[GraphRefusedError]:
    """Capture a graph per call, and return why some of them have none.

    Raises:
        GraphRefusedError: No call has one, or not all that must.
    """
    engine.turn_graphs_on()
    refusals = []
    for inputs in calls:
        try:
            engine.capture(inputs)
        except GraphRefusedError as error:
            refusals.append(error)
    if refusals and (len(refusals) == len(calls) or engine.model.options["cuda_graphs"] is True):
        raise refusals[0]
    return refusals


def _different_sizes(
    graph: GraphSpec, samples: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """Return the first samples that differ in their sizes, without empty ones."""
    first: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
    for sample in samples:
        if all(tensor.numel() for tensor in sample):
            first.setdefault(tuple(graph.dim_sizes(sample).values()), sample)
    return list(first.values())[:_IN_ADVANCE]


def _zeros(graph: GraphSpec, sizes: dict[str, int], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(
            spec.sizes(sizes) or (),
            dtype=spec.dtype,
            device=device if spec.device_type == device.type else spec.device_type,
        )
        for spec in graph.inputs
    )


def checked_sizes(stored: object, graph: GraphSpec) -> list[dict[str, int]]:
    """Return stored sizes of dims, after a look at whether the graph has such.

    Raises:
        CheckpointFormatError: They are no sizes of this graph.
    """
    dims = graph.dims
    entries: list[Any] = stored if isinstance(stored, list) else [stored]
    for entry in entries:
        fits = (
            isinstance(entry, dict)
            and set(entry) == set(dims)
            and all(type(size) is int for size in entry.values())
            and graph.completed_sizes(entry) == entry
        )
        if not fits:
            expected = ", ".join(map(str, dims.values())) or "no dims"
            msg = f"stored sizes of CUDA graphs are {entry!r}, expected a list of {expected}"
            raise CheckpointFormatError(msg, expected=expected, got=entry)
    if len(entries) > _IN_ADVANCE:
        msg = f"sizes of {len(entries)} CUDA graphs are stored, expected at most {_IN_ADVANCE}"
        raise CheckpointFormatError(msg, expected=_IN_ADVANCE, got=len(entries))
    return entries
