"""Divisions, remainders and shifts as torch rounds them, for all signs and sizes of numbers.

ONNX Runtime stops the process where the lowest integer is divided by -1, so that divisor is kept
from it. A divisor of zero raises an error there, as in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["divide", "floor_divide", "fmod", "remainder", "right_shift", "trunc"]

#: A tensor, or a number that may stand for a size.
Operand: TypeAlias = Any


def floor_divide(one: Operand, other: Operand) -> Any:  # noqa: ANN401
    """Return what ``torch.floor_divide`` does."""
    return _by_kind(one, other, _floor_integers, _floor_floats)


def remainder(one: Operand, other: Operand) -> Any:  # noqa: ANN401
    """Return what ``torch.remainder`` does."""
    return _by_kind(one, other, _remainder_integers, _remainder_floats)


def fmod(one: Operand, other: Operand) -> Any:  # noqa: ANN401
    """Return what ``torch.fmod`` does; ONNX Runtime computes that of integers in float64."""
    return _by_kind(one, other, _fmod_integers, None)


def divide(one: Operand, other: Operand, *, rounding_mode: str | None = None) -> Any:  # noqa: ANN401
    """Return what ``torch.div`` with a rounding mode does."""
    if rounding_mode == "floor":
        return floor_divide(one, other)
    if rounding_mode == "trunc":
        return _by_kind(one, other, _trunc_integers, _trunc_floats)
    return NotImplemented


def trunc(value: Tensor) -> Any:  # noqa: ANN401
    """Return what ``torch.trunc`` does, for numbers beyond those of int64 as well."""
    if not value.is_floating_point():
        return NotImplemented
    return torch.where(value < 0, torch.ceil(value), torch.floor(value))


def right_shift(one: Operand, other: Operand) -> Any:  # noqa: ANN401
    """Return what ``>>`` does: a floor of negative numbers, and the sign beyond their width."""
    dtype = torch.result_type(one, other)
    if not _is_integer(dtype):
        return NotImplemented
    last = torch.iinfo(torch.int64).bits - 1
    value = _as(one, torch.int64, other)
    sign = torch.where(value < 0, -1, 0)
    if not isinstance(other, Tensor):
        inside = 0 <= other < last
        return (_floor_integers(value, 1 << other) if inside else sign).to(dtype)
    shift = _as(other, torch.int64, one)
    inside = (shift >= 0) & (shift < last)
    # By table: powers of integers are computed in floating point.
    powers = torch.tensor([1 << power for power in range(last)], device=shift.device)
    divisor = powers[torch.where(inside, shift, 0)]
    return torch.where(inside, _floor_integers(value, divisor), sign).to(dtype)


def _by_kind(
    one: Operand,
    other: Operand,
    integers: Callable[[Tensor, Operand], Tensor],
    floats: Callable[[Tensor, Tensor], Tensor] | None,
) -> Any:  # noqa: ANN401
    """Convert operands to the type of the result, and choose the form for it."""
    dtype = torch.result_type(one, other)
    if _is_integer(dtype):
        divisor = _as(other, dtype, one) if isinstance(other, Tensor) else other
        return integers(_as(one, dtype, other), divisor)
    if floats is None or not dtype.is_floating_point:
        return NotImplemented
    # Eager computes half precision in float32, too.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return floats(_as(one, wide, other, dtype), _as(other, wide, one, dtype)).to(dtype)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _as(
    value: Operand, dtype: torch.dtype, like: Operand, via: torch.dtype | None = None
) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(via or dtype).to(dtype)
    return torch.full((), value, dtype=dtype, device=like.device)


def _guarded(other: Operand) -> Operand:
    """Return a divisor that is 1 in place of -1."""
    if isinstance(other, Tensor):
        return other if not other.dtype.is_signed else torch.where(other == -1, 1, other)
    return 1 if isinstance(other, int) and other == -1 else other


def _negated(one: Tensor, other: Operand, quotient: Tensor) -> Any:  # noqa: ANN401
    """Return a quotient by a guarded divisor with the values of the real one."""
    if isinstance(other, Tensor):
        return quotient if not other.dtype.is_signed else torch.where(other == -1, -one, quotient)
    return -one if isinstance(other, int) and other == -1 else quotient


def _floor_integers(one: Tensor, other: Operand) -> Any:  # noqa: ANN401
    divisor = _guarded(other)
    # Each exporter has one of both wrong.
    if torch._C._get_tracing_state() is not None:  # noqa: SLF001 - what jit.is_tracing() asks
        quotient = torch.div(one, divisor, rounding_mode="floor")
    else:
        quotient = torch.floor_divide(one, divisor)
    return _negated(one, other, quotient)


def _remainder_integers(one: Tensor, other: Operand) -> Tensor:
    # What is left of a division by 1 is what is left of one by -1.
    return torch.remainder(one, _guarded(other))


def _inexact(one: Tensor, other: Operand, rest: Tensor) -> Any:  # noqa: ANN401
    """Where rounding down and rounding to zero differ."""
    if isinstance(other, Tensor):
        return (rest != 0) & torch.logical_xor(one < 0, other < 0)
    return (rest != 0) & (one < 0 if other > 0 else one > 0)


def _trunc_integers(one: Tensor, other: Operand) -> Any:  # noqa: ANN401
    rest = _remainder_integers(one, other)
    return _floor_integers(one, other) + _inexact(one, other, rest).to(one.dtype)


def _fmod_integers(one: Tensor, other: Operand) -> Tensor:
    rest = _remainder_integers(one, other)
    return torch.where(_inexact(one, other, rest), rest - other, rest)


def _remainder_floats(one: Tensor, other: Tensor) -> Tensor:
    rest = torch.fmod(one, other)
    return torch.where((rest != 0) & ((other < 0) != (rest < 0)), rest + other, rest)


def _floor_floats(one: Tensor, other: Tensor) -> Tensor:
    """Follow ``c10::div_floor_floating``, which takes the remainder off before it divides."""
    rest = torch.fmod(one, other)
    ratio = one / other
    quotient = (one - rest) / other
    quotient = torch.where((rest != 0) & ((other < 0) != (rest < 0)), quotient - 1, quotient)
    lower = torch.floor(quotient)
    lower = torch.where(quotient - lower > 0.5, lower + 1, lower)  # noqa: PLR2004
    lower = torch.where(quotient == 0, ratio * 0, lower)
    return torch.where(other == 0, ratio, lower)


def _trunc_floats(one: Tensor, other: Tensor) -> Any:  # noqa: ANN401
    return trunc(one / other)
