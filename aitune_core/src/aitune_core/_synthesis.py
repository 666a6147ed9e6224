"""Inputs of other sizes, made out of recorded ones so that ids, masks and positions stay valid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

import torch
from torch import Tensor

from aitune_core.conditions import SizeCondition
from aitune_core.specs import DynamicDim, GraphSpec

__all__ = [
    "breaking_sizes",
    "corner_sizes",
    "distinct_sizes",
    "probe_sizes",
    "resize_inputs",
    "strided_copies",
]

#: Ranges up to this width are checked at every size.
_SMALL_RANGE: Final = 16
#: How many combinations of sizes are looked at for one that breaks a condition.
_MAX_COMBINATIONS: Final = 32768
#: For how many of them sizes of the other dims are looked for, and how many of these are tried.
_MAX_COMPLETED: Final = 64
_MAX_ASSIGNMENTS: Final = 64


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


def breaking_sizes(
    graph: GraphSpec, condition: SizeCondition, others: Sequence[SizeCondition], count: int
) -> tuple[list[dict[str, int]], bool]:
    """Return sizes that the graph takes and that break one condition alone.

    Args:
        graph: The graph.
        condition: The condition to break.
        others: Conditions that the sizes meet.
        count: How many sizes at most; at least 2.

    Returns:
        The sizes, and whether it is certain that none exist where there are none.
    """
    names = _free_dims(graph, condition)
    inside = distinct_sizes(graph)
    share = max(int(_MAX_COMBINATIONS ** (1 / max(len(names), 1))), 2)
    widths = [graph.dims[name].max - graph.dims[name].min + 1 for name in names]
    whole = math.prod(widths) <= _MAX_COMBINATIONS
    values = [
        _trial_sizes(graph.dims[name], condition.numbers, width if whole else share)
        for name, width in zip(names, widths, strict=True)
    ]
    # Those that other dims can neither break nor mend.
    narrow = [other for other in others if set(_free_dims(graph, other)) <= set(names)]
    alone: list[dict[str, int]] = []
    for combination in itertools.product(*values):
        chosen = dict(zip(names, combination, strict=True))
        sizes = graph.completed_sizes({**inside, **chosen})
        if sizes is None or condition.holds(sizes):
            continue
        if all(other.holds(sizes) for other in narrow):
            alone.append(chosen)
    rest = _assignments(graph, others, {*graph.dims} - {*names})
    found: list[dict[str, int]] = []
    for chosen in _spread(alone, _MAX_COMPLETED):
        tried = (graph.completed_sizes({**inside, **one, **chosen}) for one in rest)
        fitting = (
            sizes
            for sizes in tried
            if sizes is not None
            and not condition.holds(sizes)
            and all(other.holds(sizes) for other in others)
        )
        found.extend(itertools.islice(fitting, 1))
    return _spread(found, count), whole and not alone


def _spread(sizes: list[dict[str, int]], count: int) -> list[dict[str, int]]:
    """Return the first, the last, and others at random: evenly could mean one remainder only."""
    if len(sizes) <= count:
        return sizes
    inner = Random(0).sample(sizes[1:-1], count - 2)  # noqa: S311 - the same sizes each time
    return [sizes[0], *inner, sizes[-1]]


def _assignments(
    graph: GraphSpec, conditions: Sequence[SizeCondition], names: set[str]
) -> list[dict[str, int]]:
    """Return sizes of some dims to try together: inside, then around numbers in conditions."""
    numbers = [number for condition in conditions for number in condition.numbers]
    tried = {
        name: _trial_sizes(graph.dims[name], numbers, _MAX_ASSIGNMENTS) for name in sorted(names)
    }
    random = Random(0)  # noqa: S311 - the same sizes each time
    return [
        {},
        *(
            {name: random.choice(sizes) for name, sizes in tried.items()}
            for _ in range(_MAX_ASSIGNMENTS if tried else 0)
        ),
    ]


def _free_dims(graph: GraphSpec, condition: SizeCondition) -> list[str]:
    """Return the dims that decide whether a condition holds, in order; what follows is left out."""
    free = set(condition.dims)
    for one in reversed(graph.conditions):
        if one.defined in free:
            free = (free | one.dims) - {one.defined}
    return sorted(free)


def _trial_sizes(dim: DynamicDim, numbers: Sequence[int], count: int) -> list[int]:
    """Return all sizes of a short range, or its ends, those around numbers, and random ones."""
    if dim.max - dim.min + 1 <= count:
        return list(range(dim.min, dim.max + 1))
    near = {number + step for number in numbers for step in (-1, 0, 1)}
    sizes = {size for size in near if dim.min <= size <= dim.max}
    sizes |= {dim.min, dim.min + 1, dim.max - 1, dim.max}
    random = Random(0)  # noqa: S311 - the same sizes each time
    sizes |= {random.randint(dim.min, dim.max) for _ in range(max(count - len(sizes), 0))}
    return sorted(sizes)


def strided_copies(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return equal inputs that are not contiguous, where their rank allows it."""
    return tuple(
        torch.stack((tensor, tensor), dim=-1)[..., 0] if tensor.dim() else tensor.clone()
        for tensor in inputs
    )
