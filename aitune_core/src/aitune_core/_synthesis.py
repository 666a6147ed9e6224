"""Inputs of other sizes, made out of recorded ones so that ids, masks and positions stay valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from aitune_core._tensors import same_bits
from aitune_core.specs import BatchDim, GraphSpec, TensorSpec

__all__ = [
    "corner_sizes",
    "distinct_sizes",
    "probe_sizes",
    "reordered_rows",
    "resize_inputs",
    "strided_copies",
]

#: Ranges up to this width are checked at every size.
_SMALL_RANGE: Final = 16


def resize_inputs(
    graph: GraphSpec, samples: Sequence[Sequence[Tensor]], sizes: Mapping[str, int]
) -> tuple[Tensor, ...]:
    """Return inputs whose dims have ``sizes``, by slicing or repeating a recorded sample.

    Args:
        graph: The graph; dims that ``sizes`` leaves out keep the sample's size.
        samples: Recorded flat inputs, at least one.
        sizes: Wanted size of each dim, by name.
    """
    base = max(samples, key=lambda sample: (_smallest_axis(graph, sample) > 0, _numel(sample)))
    resized = []
    for spec, sample in zip(graph.inputs, base, strict=True):
        tensor = sample.detach()
        for axis, dim in spec.dynamic_axes.items():
            tensor = _resize_axis(tensor, axis, sizes.get(dim.name, tensor.shape[axis]))
        resized.append(tensor.clone())
    return tuple(resized)


def _resize_axis(tensor: Tensor, axis: int, size: int) -> Tensor:
    current = tensor.shape[axis]
    if current == size:
        return tensor
    if current == 0:
        shape = list(tensor.shape)
        shape[axis] = size
        return tensor.new_zeros(shape)
    rows = torch.arange(size, device=tensor.device) % current
    return tensor.index_select(axis, rows)


def _numel(sample: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in sample)


def _smallest_axis(graph: GraphSpec, sample: Sequence[Tensor]) -> int:
    return min(graph.dim_sizes(sample).values(), default=1)


def corner_sizes(graph: GraphSpec) -> dict[str, dict[str, int]]:
    """Return named sizes that the graph takes: ends of the ranges, their neighbours, the inside.

    Ranges of few sizes are gone through whole.
    """
    dims = graph.dims
    if not dims:
        return {}
    lowest = {name: dim.min for name, dim in dims.items()}
    highest = {name: dim.max for name, dim in dims.items()}
    inside = distinct_sizes(graph)
    # Code may treat even and odd sizes apart, or sizes that a stride divides.
    next_to = {name: min(size + 1, dims[name].max) for name, size in inside.items()}
    after_first = {name: min(size + 1, dims[name].max) for name, size in lowest.items()}
    before_last = {name: max(size - 1, dims[name].min) for name, size in highest.items()}
    cases = {
        "minimum": lowest,
        "maximum": highest,
        "interior": inside,
        "next to interior": next_to,
        "above minimum": after_first,
        "below maximum": before_last,
    }
    if len(dims) > 1:
        for name, dim in dims.items():
            cases[f"{name} at minimum"] = {**highest, name: dim.min}
    for name, dim in dims.items():
        if dim.max - dim.min <= _SMALL_RANGE:
            cases.update(
                {f"{name} {size}": {**inside, name: size} for size in range(dim.min, dim.max + 1)}
            )
    different: dict[tuple[int, ...], tuple[str, dict[str, int]]] = {}
    for label, sizes in cases.items():
        complete = graph.completed_sizes(sizes)
        if complete is not None:
            different.setdefault(tuple(complete.values()), (label, complete))
    return dict(different.values())


def distinct_sizes(graph: GraphSpec) -> dict[str, int]:
    """Return a size inside each dim's range, different from one another where the ranges allow.

    Dims that a condition defines have the size that follows, where it is within their range.
    """
    dims = graph.dims
    taken: set[int] = set()
    sizes: dict[str, int] = {}
    for name, dim in dims.items():
        middle = (dim.min + dim.max + 1) // 2
        nearby = (middle + sign * step for step in range(len(dims) + 1) for sign in (1, -1))
        sizes[name] = next(
            (size for size in nearby if dim.min <= size <= dim.max and size not in taken), middle
        )
        taken.add(sizes[name])
    return graph.completed_sizes(sizes) or sizes


def probe_sizes(graph: GraphSpec) -> list[dict[str, int]]:
    """Return sizes that tell whether a module takes the dims as free of one another."""
    inside = distinct_sizes(graph)
    apart = {
        name: min(inside[name] + step, dim.max)
        for step, (name, dim) in enumerate(graph.dims.items())
    }
    return [inside, graph.completed_sizes(apart) or inside]


def reordered_rows(graph: GraphSpec, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """Return inputs whose rows are in another order, the same for all; None where there are none.

    Rows lie along a `BatchDim`; without one, along axis 0 where all inputs have one size there.
    """
    axes = [_row_axis(spec) for spec in graph.inputs]
    if all(axis is None for axis in axes):
        sizes = {tensor.shape[0] for tensor in inputs if tensor.dim()}
        if len(sizes) != 1 or any(_may_be_offsets(tensor) for tensor in inputs):
            return None
        axes = [0 if tensor.dim() else None for tensor in inputs]
    moved = tuple(
        tensor.clone() if axis is None else tensor.detach().roll(1, axis)
        for axis, tensor in zip(axes, inputs, strict=True)
    )
    same = all(same_bits(one, other) for one, other in zip(moved, inputs, strict=True))
    return None if same else moved


def _row_axis(spec: TensorSpec) -> int | None:
    return next(
        (axis for axis, dim in spec.dynamic_axes.items() if isinstance(dim, BatchDim)), None
    )


def _may_be_offsets(tensor: Tensor) -> bool:
    """Whether values may be places in another tensor, which end a process on CUDA if wrong."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.is_cuda and tensor.dim() == 1 and whole


def strided_copies(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return equal inputs that are not contiguous, where their rank allows it."""
    return tuple(
        torch.stack((tensor, tensor), dim=-1)[..., 0] if tensor.dim() else tensor.clone()
        for tensor in inputs
    )
