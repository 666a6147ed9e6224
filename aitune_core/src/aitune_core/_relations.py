"""Dims that follow from others, such as a mask's length from that of past and new tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import attrs

from aitune_core.conditions import SizeCondition
from aitune_core.specs import DynamicDim, GraphSpec, TensorSpec

__all__ = ["related_dims"]

#: How many graphs with relations are tried on the module.
_MAX_TRIED: Final = 32


def related_dims(
    graph: GraphSpec,
    calls: list[dict[str, int]],
    declared: frozenset[str],
    accepts: Callable[[GraphSpec], bool],
) -> GraphSpec:
    """Return the graph with the conditions that its dims need, so that the module takes them.

    A relation that held in every recorded call may be chance. It is taken only where the module
    refuses sizes that are free of one another, and takes those that keep to the relation.

    Args:
        graph: The graph, without conditions.
        calls: Sizes of its dims in each recorded call.
        declared: Names of dims whose range the user gave; it stays.
        accepts: Whether the module takes inputs of this graph.
    """
    if len(graph.dims) < 2 or accepts(graph):  # noqa: PLR2004 - one dim has no relation
        return graph
    single = list(_relations(graph.dims, calls))
    pairs = (
        pair for pair in itertools.combinations(single, 2) if pair[0].defined != pair[1].defined
    )
    tried = itertools.chain(((one,) for one in single), pairs)
    for conditions in itertools.islice(tried, _MAX_TRIED):
        related = _with_conditions(graph, conditions, declared)
        if accepts(related):
            return related
    return graph


def _relations(
    dims: Mapping[str, DynamicDim], calls: list[dict[str, int]]
) -> Iterator[SizeCondition]:
    """Yield what holds in all calls: sums first, since they are the most telling."""

    def always(holds: Callable[[dict[str, int]], bool]) -> bool:
        return all(holds(sizes) for sizes in calls)

    names = list(dims)
    for name, (one, other) in itertools.product(names, itertools.combinations(names, 2)):
        if name in {one, other}:
            continue
        if always(lambda sizes: sizes[name] == sizes[one] + sizes[other]):  # noqa: B023 - used here
            yield SizeCondition(f"{name} == {one} + {other}")
        if always(lambda sizes: sizes[name] == sizes[one] * sizes[other]):  # noqa: B023
            yield SizeCondition(f"{name} == {one} * {other}")
    first = calls[0]
    for name, one in itertools.permutations(names, 2):
        step = first[name] - first[one]
        if step > 0 and always(lambda sizes: sizes[name] == sizes[one] + step):  # noqa: B023
            yield SizeCondition(f"{name} == {one} + {step}")
        factor = first[name] // max(first[one], 1)
        if factor > 1 and always(lambda sizes: sizes[name] == sizes[one] * factor):  # noqa: B023
            yield SizeCondition(f"{name} == {one} * {factor}")
        if factor > 1 and always(lambda sizes: sizes[one] == sizes[name] // factor):  # noqa: B023
            yield SizeCondition(f"{one} == {name} // {factor}")


def _with_conditions(
    graph: GraphSpec, conditions: tuple[SizeCondition, ...], declared: frozenset[str]
) -> GraphSpec:
    """Return the graph with conditions; the range of a dim that follows is what follows."""
    dims = graph.dims
    for condition in conditions:
        name = condition.defined
        if name is None or name in declared:
            continue
        ends = itertools.product(*((dim.min, dim.max) for dim in dims.values()))
        values = [condition.defined_size(dict(zip(dims, sizes, strict=True))) for sizes in ends]
        old = dims[name]
        dims = {**dims, name: type(old)(name=name, min=min(values), max=max(values), opt=old.opt)}
    return attrs.evolve(
        graph,
        inputs=tuple(_with_dims(spec, dims) for spec in graph.inputs),
        conditions=conditions,
    )


def _with_dims(spec: TensorSpec, dims: Mapping[str, DynamicDim]) -> TensorSpec:
    shape = tuple(dims[size.name] if isinstance(size, DynamicDim) else size for size in spec.shape)
    return attrs.evolve(spec, shape=shape)
