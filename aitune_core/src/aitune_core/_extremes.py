"""Values that were not recorded, at which formulas that are equal on paper come apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from aitune_core._operators import look_at_operators
from aitune_core._scalars import scalar_kinds
from aitune_core._sorting import Sorting, sorting_of
from aitune_core._tensors import computable
from aitune_core.specs import GraphSpec

__all__ = ["converts_to_indices", "extreme_inputs", "nudged"]

#: Outside of what networks are fed, and far outside, yet not where float32 gives out.
_SCALES: Final = (30.0, 1000.0)
#: Units in the last place that inputs are moved by, and how far outputs may differ for it.
_NUDGE: Final = 4.0
_MARGIN: Final = 8.0
#: Operators that take values of a range only, and end a process on CUDA for others.
_RANGED: Final = frozenset({"binary_cross_entropy", "multinomial", "bernoulli"})


def extreme_inputs(
    graph: GraphSpec, inputs: Sequence[Tensor]
) -> Iterator[tuple[str, tuple[Tensor, ...], float]]:
    """Yield changed inputs with names before and scales after them.

    They are much larger, of the other sign, zeros, all hidden.

    Floating-point inputs and booleans are changed; integers may be indices. Half precision is not
    made larger, since it would overflow.
    """
    numbers = scalar_kinds(graph.call_structure)

    def changed(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return tuple(
            tensor if place in numbers else change(tensor) for place, tensor in enumerate(inputs)
        )

    real = [
        tensor for place, tensor in enumerate(inputs) if place not in numbers and computable(tensor)
    ]
    if any(tensor.dtype.itemsize >= torch.float32.itemsize for tensor in real):
        for scale in _SCALES:
            larger = changed(functools.partial(_scaled, factor=scale))
            yield f"inputs times {scale:g}", larger, scale
    if real:
        yield (
            "inputs of the other sign",
            changed(lambda tensor: -tensor if computable(tensor) else tensor),
            1.0,
        )
        yield (
            "inputs of zeros",
            changed(lambda tensor: torch.zeros_like(tensor) if computable(tensor) else tensor),
            1.0,
        )
    if any(tensor.dtype is torch.bool for tensor in inputs):
        yield "booleans all False", changed(functools.partial(_booleans, value=False)), 1.0
        yield "booleans all True", changed(functools.partial(_booleans, value=True)), 1.0


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    wide = computable(tensor) and tensor.dtype.itemsize >= torch.float32.itemsize
    return tensor * factor if wide else tensor


def _booleans(tensor: Tensor, *, value: bool) -> Tensor:
    return torch.full_like(tensor, value) if tensor.dtype is torch.bool else tensor


def nudged(
    graph: GraphSpec,
    inputs: Sequence[Tensor],
    eager: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
) -> list[float]:
    """Return by which share outputs may differ for rounding errors of the inputs alone.

    Infinite for integers that change, and for all outputs where equal values are sorted: their
    order is not promised.

    Args:
        graph: The graph.
        inputs: Flat inputs.
        eager: Runs the module on flat inputs.
    """
    if sorting_of(lambda: eager(inputs)) is Sorting.TIES:
        return [math.inf] * len(graph.outputs)
    before = eager(inputs)
    after = eager([_moved(tensor) for tensor in inputs])
    shares = []
    for _, one, other in zip(graph.outputs, before, after, strict=True):
        if one.shape != other.shape or not one.numel():
            shares.append(0.0)
            continue
        if not computable(one):
            shares.append(0.0 if torch.equal(one, other) else math.inf)
            continue
        wide = torch.complex128 if one.is_complex() else torch.float64
        moved = (one.to(wide) - other.to(wide)).abs().nan_to_num(0.0, 0.0, 0.0)
        size = one.to(wide).abs().nan_to_num(0.0, 0.0, 0.0)
        typical = size.square().mean().sqrt()
        shares.append(float((moved / (size + typical).clamp(min=1e-300)).max()) * _MARGIN)
    return shares


def _moved(tensor: Tensor) -> Tensor:
    if not computable(tensor):
        return tensor
    unit = _NUDGE * torch.finfo(tensor.dtype).eps
    signs = torch.ones(tensor.numel(), device=tensor.device)
    signs[::2] = -1.0
    signs = signs.reshape(tensor.shape).to(tensor.dtype)
    return torch.where(tensor == 0, unit * signs, tensor * (1.0 + unit * signs))


def converts_to_indices(run: Callable[[], object]) -> bool:
    """Whether a run makes integers of floating-point values, or draws from probabilities."""
    found = False

    def look(func: Any, args: Sequence[Any], _: object, result: object) -> None:  # noqa: ANN401
        nonlocal found
        name = func.overloadpacket.__name__
        found |= name in _RANGED
        if name in {"_to_copy", "copy_"} and args and isinstance(args[0], Tensor):
            source = args[1] if name == "copy_" else args[0]
            whole = isinstance(result, Tensor) and not computable(result)
            found |= whole and isinstance(source, Tensor) and computable(source)

    look_at_operators(run, look)
    return found
