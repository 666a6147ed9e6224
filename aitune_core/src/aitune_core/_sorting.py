"""Sorted values: torch promises no order of equal ones."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from aitune_core._operators import look_at_operators
from aitune_core._tensors import computable

__all__ = ["Sorting", "apart", "sorting_of"]

#: Operators that put values in an order.
_SORTING: Final = frozenset({"argsort", "sort", "topk"})
#: How far values are moved apart, as a share of them.
_APART: Final = 0.01


class Sorting(enum.Enum):
    """Whether a run sorted values, and whether equal ones were among them."""

    NONE = enum.auto()
    DISTINCT = enum.auto()
    TIES = enum.auto()


def sorting_of(run: Callable[[], object]) -> Sorting:
    """Return what a run of a module sorts; what it raises passes."""
    ties: list[bool] = []

    def look(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], _: object) -> None:  # noqa: ANN401
        if func.overloadpacket.__name__ in _SORTING and not kwargs.get("stable"):
            ties.append(_has_ties(args[0], _sorted_axis(func, args, kwargs)))

    look_at_operators(run, look)
    if not ties:
        return Sorting.NONE
    return Sorting.TIES if any(ties) else Sorting.DISTINCT


def apart(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return inputs whose floating-point values are moved a little, always by the same shares.

    Single numbers stay.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    return tuple(
        tensor
        * (1 + _APART * torch.rand(tensor.shape, generator=generator, device="cpu")).to(tensor)
        if computable(tensor) and tensor.dim()
        else tensor
        for tensor in inputs
    )


def _sorted_axis(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:  # noqa: ANN401
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - no other way
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    axis: int = given.get("dim", -1)
    return axis


def _has_ties(values: Tensor, dim: int) -> bool:
    if not values.dim():
        return False
    ordered, _ = torch.sort(values, dim=dim, stable=True)
    size = ordered.shape[dim]
    return bool(
        size and (ordered.narrow(dim, 1, size - 1) == ordered.narrow(dim, 0, size - 1)).any()
    )
