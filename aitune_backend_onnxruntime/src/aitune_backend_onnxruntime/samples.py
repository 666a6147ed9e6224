"""The inputs to export with: sizes that show an exporter which axes are really free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from aitune_core.backend import BuildRequest
    from aitune_core.specs import DynamicDim, GraphSpec, TensorSpec

__all__ = ["export_inputs", "export_sizes", "varying_axes"]

#: Exporters treat 0 and 1 as constants.
_SMALLEST_FREE = 2
#: How many sizes of a range are looked at.
_SIZES_TRIED = 64


def varying_axes(spec: TensorSpec) -> dict[int, DynamicDim]:
    """Return the axes that can have more than one size, by position."""
    return {axis: dim for axis, dim in spec.dynamic_axes.items() if dim.min < dim.max}


def export_sizes(graph: GraphSpec, recorded: Iterable[dict[str, int]]) -> dict[str, int]:
    """Choose a size for each dim of a graph.

    Sizes are at least 2 and differ from each other and from the static sizes where the ranges
    allow it: exporters take equal sizes for one size, and 0 and 1 for constants.

    Args:
        graph: The graph.
        recorded: Dim sizes of the recorded calls, which are preferred.
    """
    calls = list(recorded)
    taken = {size for spec in graph.inputs for size in spec.shape if isinstance(size, int)}
    chosen: dict[str, int] = {}
    for name, dim in graph.dims.items():
        sizes = list(dict.fromkeys(_candidates(dim, [call[name] for call in calls])))
        free = [size for size in sizes if size >= _SMALLEST_FREE]
        apart = [size for size in free if size not in taken]
        chosen[name] = (apart or free or sizes)[0]
        taken.add(chosen[name])
    return chosen


def _candidates(dim: DynamicDim, recorded: list[int]) -> Iterator[int]:
    if dim.opt is not None:
        yield dim.opt
    yield from (size for size in recorded if dim.min <= size <= dim.max)
    start = max(dim.min, min(_SMALLEST_FREE, dim.max))
    yield from range(start, min(dim.max, start + _SIZES_TRIED) + 1)
    yield dim.max


def export_inputs(request: BuildRequest) -> tuple[Tensor, ...]:
    """Return flat inputs to export with, on the request's device.

    Falls back to a recorded call where the module refuses the chosen sizes.
    """
    graph = request.graph
    calls = [graph.dim_sizes(sample) for sample in request.samples]
    sizes = export_sizes(graph, calls)
    if sizes in calls:
        return request.samples[calls.index(sizes)]
    try:
        inputs = request.inputs_at(sizes)
        with torch.no_grad():
            request.module(*inputs)
    except Exception:  # noqa: BLE001 - the user's module may raise anything at unseen sizes
        return max(request.samples, key=lambda sample: _free_axes(graph, sample))
    return inputs


def _free_axes(graph: GraphSpec, sample: tuple[Tensor, ...]) -> int:
    return sum(size >= _SMALLEST_FREE for size in graph.dim_sizes(sample).values())
