"""Which sizes an engine is right for, out of what its way of building took for granted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Final, TypeAlias

from aitune_core._simplify import simplified
from aitune_core._synthesis import distinct_sizes
from aitune_core.conditions import SizeCondition
from aitune_core.specs import DynamicDim, GraphSpec

__all__ = ["Agrees", "Assumed", "breaking_sizes", "needed_conditions"]

#: Whether an engine agrees with eager at some sizes; None where eager refuses them.
Agrees: TypeAlias = Callable[[Mapping[str, int]], bool | None]
#: What the module's code takes for granted at some sizes: that which leads it down one path.
Assumed: TypeAlias = Callable[[Mapping[str, int]], Sequence[SizeCondition]]

#: How many combinations of sizes are looked at for one that breaks a condition.
_MAX_COMBINATIONS: Final = 32768
#: For how many of them sizes of the other dims are looked for, and how many of these are tried.
_MAX_COMPLETED: Final = 64
_MAX_ASSIGNMENTS: Final = 64
#: At how many sizes that break a condition an engine must agree with eager to go without it.
_BREAKING_SIZES: Final = 8
#: How many paths through the module's code are followed.
_MAX_PATHS: Final = 16
#: How many sizes that eager refuses are passed over in looking for others.
_MAX_REFUSED: Final = 64
#: How many combinations of sizes are looked at for one on no known path.
_MAX_UNKNOWN: Final = 8192


def needed_conditions(
    graph: GraphSpec,
    conditions: Sequence[SizeCondition],
    agrees: Agrees,
    assumed: Assumed | None = None,
    recorded: Sequence[Mapping[str, int]] = (),
) -> tuple[SizeCondition, ...]:
    """Return those conditions without which an engine differs from eager.

    A condition that follows from the others is left out. So is one at whose breaking sizes the
    engine agrees with eager: only the way of building asked for it. The breaking sizes are taken
    from all over the ranges, and from each path that the module's code takes at them.

    Args:
        graph: The graph.
        conditions: What the engine was built under.
        agrees: Compares the engine with eager.
        assumed: Follows the module's code; None where that cannot be done. May raise.
        recorded: Sizes of the recorded calls. A condition that one of them breaks is not kept for
            sizes that eager refuses: broadcasting takes equal sizes or 1.
    """
    needed = list(dict.fromkeys(conditions))
    paths = _Paths(graph, agrees, assumed)
    # The longest first: what is left is what reads best.
    for one in sorted(needed, key=lambda condition: len(condition.text), reverse=True):
        others = [other for other in needed if other != one]
        broken, certain = breaking_sizes(graph, one, others, _BREAKING_SIZES)
        refusable = not all(map(one.holds, recorded))
        found = [agrees(sizes) for sizes in broken]
        if False in found or (None in found and not refusable):
            continue
        if paths.agree(one, others, refusable=refusable) if broken else certain:
            needed.remove(one)
    return simplified(graph, needed)


class _Paths:
    """Paths through the module's code on which an engine agrees with eager."""

    def __init__(self, graph: GraphSpec, agrees: Agrees, assumed: Assumed | None) -> None:
        self._graph = graph
        self._agrees = agrees
        self._assumed = assumed
        self._known: list[Sequence[SizeCondition]] = []
        self._endless = False

    def agree(
        self, condition: SizeCondition, others: Sequence[SizeCondition], *, refusable: bool
    ) -> bool:
        """Whether the engine agrees on all paths of sizes that break one condition alone."""
        if self._assumed is None or self._endless:
            return not self._endless
        followed = refused = 0
        while (sizes := self._unknown(condition, others)) is not None:
            agrees = self._agrees(sizes)
            if agrees is None and refusable:
                # Code that refuses most sizes has no end of them, which says nothing.
                if refused == _MAX_REFUSED:
                    return True
                refused += 1
                self._known.append([SizeCondition(f"{k} == {v}") for k, v in sizes.items()])
                continue
            self._endless = followed == _MAX_PATHS
            if not agrees or self._endless:
                return False
            followed += 1
            try:
                self._known.append(self._assumed(sizes))
            except Exception:  # noqa: BLE001 - of the user's module: it cannot be followed
                return False
        return True

    def _unknown(
        self, condition: SizeCondition, others: Sequence[SizeCondition]
    ) -> dict[str, int] | None:
        """Return sizes on none of the known paths."""
        told = [condition, *others, *itertools.chain.from_iterable(self._known)]
        names = sorted({name for one in told for name in _free_dims(self._graph, one)})
        for sizes in _combinations(self._graph, names, told, _MAX_UNKNOWN):
            if (
                not condition.holds(sizes)
                and all(other.holds(sizes) for other in others)
                and not any(all(one.holds(sizes) for one in path) for path in self._known)
            ):
                return sizes
        return None


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
    whole = _count(graph, names) <= _MAX_COMBINATIONS
    # Those that other dims can neither break nor mend.
    narrow = [other for other in others if set(_free_dims(graph, other)) <= set(names)]
    alone = [
        {name: sizes[name] for name in names}
        for sizes in _combinations(graph, names, [condition], _MAX_COMBINATIONS)
        if not condition.holds(sizes) and all(other.holds(sizes) for other in narrow)
    ]
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


def _count(graph: GraphSpec, names: Sequence[str]) -> int:
    return math.prod(graph.dims[name].max - graph.dims[name].min + 1 for name in names)


def _combinations(
    graph: GraphSpec, names: Sequence[str], conditions: Sequence[SizeCondition], most: int
) -> Iterator[dict[str, int]]:
    """Yield sizes that the graph takes: all of some dims where they are few, else many."""
    inside = distinct_sizes(graph)
    numbers = sorted({number for condition in conditions for number in condition.numbers})
    share = max(int(most ** (1 / max(len(names), 1))), 2)
    whole = _count(graph, names) <= most
    values = [
        range(graph.dims[name].min, graph.dims[name].max + 1)
        if whole
        else _trial_sizes(graph.dims[name], numbers, share)
        for name in names
    ]
    for combination in itertools.product(*values):
        sizes = graph.completed_sizes({**inside, **dict(zip(names, combination, strict=True))})
        if sizes is not None:
            yield sizes


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
    """Return all sizes of a short range; else its ends, random ones, and those of numbers.

    Numbers may be bounds or divisors: sizes next to them and to their multiples are taken.
    """
    if dim.max - dim.min + 1 <= count:
        return list(range(dim.min, dim.max + 1))
    multiples = {
        multiple
        for number in numbers
        if number > 0
        for multiple in (2 * number, dim.max - dim.max % number)
    }
    near = {number + step for number in {*numbers, *multiples} for step in (-1, 0, 1)}
    sizes = {size for size in near if dim.min <= size <= dim.max}
    sizes |= {dim.min, dim.min + 1, dim.max - 1, dim.max}
    random = Random(0)  # noqa: S311 - the same sizes each time
    sizes |= {random.randint(dim.min, dim.max) for _ in range(max(count - len(sizes), 0))}
    return sorted(sizes)
