"""Numbers that change from call to call, made inputs so that not each value needs a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from aitune_core._trees import SCALAR_HOLE, Structure, leaf_paths, map_leaves, unflatten

__all__ = [
    "CallStructure",
    "Lifted",
    "family",
    "lift",
    "number_places",
    "numbers_of",
    "scalar_kinds",
    "scalar_tensor",
]

CallStructure: TypeAlias = tuple[Structure, ...]
#: A call structure whose numbers are holes, and its leaves: tensors and numbers in order.
Lifted: TypeAlias = tuple[CallStructure, list[Any]]

#: They hold every float, and the integers of 64 bits; larger ones are no numbers here.
_DTYPES: Final[Mapping[type, torch.dtype]] = {float: torch.float64, int: torch.int64}
_INT64: Final = torch.iinfo(torch.int64)


def _is_number(leaf: Structure) -> bool:
    if leaf[0] != "=" or leaf[1] not in _DTYPES:
        return False
    return leaf[1] is float or _INT64.min <= leaf[2] <= _INT64.max


def numbers_of(structure: CallStructure) -> tuple[float, ...]:
    """Return the numbers of a call, in order; booleans are no numbers."""
    return tuple(
        unflatten(leaf, iter(()))
        for child in structure
        for _, leaf in leaf_paths(child)
        if _is_number(leaf)
    )


def lift(structure: CallStructure, leaves: Sequence[Tensor], places: frozenset[int]) -> Lifted:
    """Turn numbers of a call into leaves.

    Args:
        structure: The call.
        leaves: Its tensors.
        places: Which numbers, counted in the order of `numbers_of`.
    """
    tensors = iter(leaves)
    lifted: list[Any] = []
    count = -1

    def change(leaf: Structure) -> Structure:
        nonlocal count
        if leaf[0] == "*":
            lifted.append(next(tensors))
        elif _is_number(leaf):
            count += 1
            if count in places:
                lifted.append(unflatten(leaf, iter(())))
                return (SCALAR_HOLE, leaf[1])
        return leaf

    return tuple(map_leaves(child, change) for child in structure), lifted


def family(structure: CallStructure) -> CallStructure:
    """Return the structure with all numbers as holes: what calls share that differ in numbers."""

    def change(leaf: Structure) -> Structure:
        return (SCALAR_HOLE, leaf[1]) if _is_number(leaf) else leaf

    return tuple(map_leaves(child, change) for child in structure)


def number_places(structure: CallStructure) -> frozenset[int]:
    """Return which numbers of a call with lifted ones are inputs, counted as by `lift`."""
    kinds = [leaf for child in structure for _, leaf in leaf_paths(child)]
    numbers = [leaf for leaf in kinds if _is_number(leaf) or leaf[0] == SCALAR_HOLE]
    return frozenset(place for place, leaf in enumerate(numbers) if leaf[0] == SCALAR_HOLE)


def scalar_kinds(structure: CallStructure) -> dict[int, type]:
    """Return the Python type of each input that is a number, by its index among the inputs."""
    holes = [leaf for child in structure for _, leaf in leaf_paths(child) if leaf[0] != "="]
    return {index: leaf[1] for index, leaf in enumerate(holes) if leaf[0] == SCALAR_HOLE}


def scalar_tensor(value: float, device: torch.device) -> Tensor:
    """Return a number as a 0-d tensor: float64 or int64."""
    return torch.tensor(value, dtype=_DTYPES[type(value)], device=device)
