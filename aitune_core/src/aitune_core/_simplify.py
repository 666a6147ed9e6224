"""Shorter conditions on sizes that mean the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from aitune_core.conditions import SizeCondition
from aitune_core.specs import DynamicDim, GraphSpec

__all__ = ["simplified"]

#: Ranges wider than this are not gone through.
_MAX_WIDTH: Final = 32768
#: The largest divisor that is looked for.
_MAX_DIVISOR: Final = 1024


def simplified(graph: GraphSpec, conditions: Sequence[SizeCondition]) -> tuple[SizeCondition, ...]:
    """Return conditions that a graph's sizes meet exactly where they meet the given ones.

    Several conditions on one dim become its range or its divisor, where that says it all.
    """
    kept = list(conditions)
    for dim in graph.dims.values():
        alone = [condition for condition in kept if condition.dims == {dim.name}]
        if not alone or dim.max - dim.min > _MAX_WIDTH:
            continue
        short = _shortest(dim, alone)
        if short is not None and sum(len(one.text) for one in alone) > len(short.text):
            kept[kept.index(alone[0])] = short
            kept = [one for one in kept if one not in alone]
    return tuple(kept)


def _shortest(dim: DynamicDim, conditions: Sequence[SizeCondition]) -> SizeCondition | None:
    sizes = range(dim.min, dim.max + 1)
    allowed = [size for size in sizes if all(one.holds({dim.name: size}) for one in conditions)]
    if not allowed:
        return None
    for text in _forms(dim, allowed):
        condition = SizeCondition(text)
        if allowed == [size for size in sizes if condition.holds({dim.name: size})]:
            return condition
    return None


def _forms(dim: DynamicDim, allowed: Sequence[int]) -> Iterator[str]:
    """Yield what may describe the allowed sizes, best first."""
    name, first, last = dim.name, allowed[0], allowed[-1]
    if first == last:
        yield f"{name} == {first}"
        return
    yield f"{name} <= {last}"
    yield f"{name} >= {first}"
    yield f"{first} <= {name} <= {last}"
    step = allowed[1] - first
    if 1 < step <= _MAX_DIVISOR:
        yield f"{name} % {step} == {first % step}"
    missing = {*range(dim.min, dim.max + 1)} - {*allowed}
    if len(missing) == 1:
        yield f"{name} != {missing.pop()}"
    if len(missing) > 1:
        one, other, *_ = sorted(missing)
        yield f"{name} % {other - one} != {one % (other - one)}"
