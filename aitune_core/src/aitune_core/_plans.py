"""Plans: calls that look like earlier ones are taken apart and put together without a search.

A plan belongs to one way of writing a call and one structure. It is a tree of functions made
once; whatever it does not expect, it leaves to the general way.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from aitune_core._trees import HOLE, Structure, unflatten

__all__ = ["Builder", "Facts", "Plan", "Taker", "builder", "facts_of", "taker"]

#: Appends the tensors of a value; returns whether the value is as expected.
Taker: TypeAlias = Callable[[Any, list[Any]], bool]
#: Builds a value, taking tensors from an iterator.
Builder: TypeAlias = Callable[[Any], Any]
#: What tells graphs apart, by tensor.
Facts: TypeAlias = tuple[Any, ...]

_PLAIN_TYPES: Final = frozenset({Tensor, nn.Parameter})
_CONSTANTS: Final = (type(None), bool, int, str)
_CALL: Final[Any] = operator.call
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
_FACTS: Final = operator.attrgetter("dtype", "shape", "device", "layout")


def facts_of(leaves: Sequence[Tensor]) -> Facts:
    """Return element type, shape, device and layout of each tensor."""
    return tuple(map(_FACTS, leaves))


def _plain(leaves: Sequence[Any]) -> bool:
    """Whether all are tensors of no subclass, and none asks for gradients that are on."""
    if not _PLAIN_TYPES.issuperset(map(type, leaves)):
        return False
    return not (torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, leaves)))


class Plan:
    """Takes calls of one structure apart.

    Args:
        takers: For each argument with something to check, in flat order: where it is (a position
            or a keyword), and what takes it.
    """

    def __init__(self, takers: Sequence[tuple[int | str, Taker]]) -> None:
        self._takers: list[tuple[bool, Any, Taker]] = [
            (isinstance(place, str), place, take) for place, take in takers
        ]
        #: Whether the arguments are the tensors.
        self._flat = all(
            place == index and take is _take_tensor for index, (place, take) in enumerate(takers)
        )

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the flat tensors of a call; None where it is of another structure."""
        leaves: list[Any] = []
        if self._flat and not kwargs:
            leaves += args
        else:
            for by_keyword, place, take in self._takers:
                if not take(kwargs[place] if by_keyword else args[place], leaves):
                    return None
        return leaves if _plain(leaves) else None


def taker(structure: Structure) -> Taker | None:
    """Return what takes values of a structure apart; None for kinds that it does not know."""
    tag = structure[0]
    if structure == HOLE:
        return _take_tensor
    if tag == "=" and structure[1] in _CONSTANTS:
        return _constant_taker(structure[1], structure[2])
    if tag in {"list", "tuple"}:
        return _sequence_taker(list if tag == "list" else tuple, structure[1])
    if tag == "dict" and all(kind is str for kind, _ in structure[1]):
        return _dict_taker([key for _, key in structure[1]], structure[2])
    return None


def _take_tensor(value: object, leaves: list[Any]) -> bool:
    leaves.append(value)  # its type is looked at with those of all others
    return True


def _constant_taker(kind: type, expected: object) -> Taker:
    return lambda value, _leaves: type(value) is kind and value == expected


def _sequence_taker(kind: type[Any], children: Sequence[Structure]) -> Taker | None:
    count = len(children)
    if all(child == HOLE for child in children):

        def take_all(value: Any, leaves: list[Any]) -> bool:  # noqa: ANN401
            if type(value) is not kind or len(value) != count:
                return False
            leaves.extend(value)
            return True

        return take_all
    takers = _takers(children)
    if takers is None:
        return None

    def take(value: Any, leaves: list[Any]) -> bool:  # noqa: ANN401
        if type(value) is not kind or len(value) != count:
            return False
        return all(map(_CALL, takers, value, itertools.repeat(leaves)))

    return take


def _dict_taker(keys: list[str], children: Sequence[Structure]) -> Taker | None:
    if all(child == HOLE for child in children):

        def take_all(value: Any, leaves: list[Any]) -> bool:  # noqa: ANN401
            if type(value) is not dict or list(value) != keys:
                return False
            leaves.extend(value.values())
            return True

        return take_all
    takers = _takers(children)
    if takers is None:
        return None

    def take(value: Any, leaves: list[Any]) -> bool:  # noqa: ANN401
        if type(value) is not dict or list(value) != keys:
            return False
        return all(map(_CALL, takers, value.values(), itertools.repeat(leaves)))

    return take


def _takers(children: Sequence[Structure]) -> list[Taker] | None:
    takers = [taker(child) for child in children]
    return None if None in takers else [one for one in takers if one is not None]


def builder(structure: Structure) -> Builder:
    """Return what builds values of a structure from an iterator over their tensors."""
    tag = structure[0]
    if structure == HOLE:
        return next
    if tag == "=" and structure[1] in _CONSTANTS:
        constant = structure[2]
        return lambda _leaves: constant
    if tag in {"list", "tuple"}:
        return _sequence_builder(list if tag == "list" else tuple, structure[1])
    if tag == "dict":
        named = [(key, builder(child)) for (_, key), child in zip(*structure[1:], strict=True)]
        return lambda leaves: {key: part(leaves) for key, part in named}
    return lambda leaves: unflatten(structure, leaves)


def _sequence_builder(kind: type[Any], children: Sequence[Structure]) -> Builder:
    count = len(children)
    if all(child == HOLE for child in children):
        return lambda leaves: kind(itertools.islice(leaves, count))
    parts = [builder(child) for child in children]
    return lambda leaves: kind([part(leaves) for part in parts])
