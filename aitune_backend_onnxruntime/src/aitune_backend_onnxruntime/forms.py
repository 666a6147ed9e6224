"""Functions of PyTorch in forms that export right for all values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ExactForms"]


class ExactForms(TorchFunctionMode):
    """Replaces functions whose exported form is wrong for some values, in this thread.

    - ``logsigmoid`` is exported as the logarithm of a sigmoid, which is infinite below -104.
    - ``atan2`` takes the wrong half of the axis for a zero and a negative number.
    - ``interpolate`` to a given size takes a neighbour at some pairs of sizes, in nearest mode.
    - The lowest integer divided by -1 ends the process in ONNX Runtime.
    - The tracer divides negative integers towards zero, also in right shifts.
    """

    def __init__(self, *, tracing: bool) -> None:
        super().__init__()
        self._forms: dict[object, Callable[..., Any]] = {
            functional.logsigmoid: _log_sigmoid,
            torch.atan2: _atan2,
            Tensor.atan2: _atan2,
            torch.arctan2: _atan2,
            Tensor.arctan2: _atan2,
            functional.interpolate: _interpolate,
        }
        for owner in (torch, Tensor):
            self._forms |= {owner.floor_divide: _floor_divide, owner.remainder: _remainder}
            self._forms |= {owner.div: _divide, owner.divide: _divide, owner.fmod: _fmod}
        self._forms |= {Tensor.__floordiv__: _floor_divide, Tensor.__mod__: _remainder}
        if tracing:
            self._forms |= {
                Tensor.__rshift__: _right_shift,
                torch.bitwise_right_shift: _right_shift,
                Tensor.bitwise_right_shift: _right_shift,
            }

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - torch's functions have no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        form = self._forms.get(func)
        result = NotImplemented if form is None else form(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _log_sigmoid(input: Tensor) -> Tensor:  # noqa: A002 - as torch's
    # log(1 + small), which exports would round to 0.
    small = torch.exp(-input.abs())
    total = 1 + small
    exact = total == 1
    logarithm = torch.log(total) * (small / torch.where(exact, torch.ones_like(total), total - 1))
    return input.clamp(max=0) - torch.where(exact, small, logarithm)


def _atan2(input: Tensor, other: Any, **options: Any) -> Any:  # noqa: A002, ANN401
    if options or not isinstance(other, Tensor) or not input.is_floating_point():
        return NotImplemented
    y, x = input, other
    left = torch.where(y < 0, -math.pi, math.pi)
    upright = torch.where(y > 0, math.pi / 2, torch.where(y < 0, -math.pi / 2, y * 0.0))
    slope = torch.atan(y / torch.where(x == 0, torch.ones_like(x), x))
    angle = torch.where(x > 0, slope, torch.where(x < 0, slope + left, upright))
    return angle.to(torch.result_type(input, other))


def _interpolate(
    input: Tensor,  # noqa: A002 - as torch's
    size: Any = None,  # noqa: ANN401
    scale_factor: Any = None,  # noqa: ANN401
    mode: str = "nearest",
    *rest: Any,  # noqa: ANN401
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    if size is None or mode != "nearest" or scale_factor is not None or rest:
        return NotImplemented
    if any(value for value in options.values()):
        return NotImplemented
    before = input.shape[2:]
    after = list(size) if isinstance(size, tuple | list | torch.Size) else [size] * len(before)
    result = input
    for axis, (old, new) in enumerate(zip(before, after, strict=True), 2):
        fixed = type(old) is int and type(new) is int
        if fixed and new % old == 0:
            result = result.repeat_interleave(new // old, axis) if new != old else result
        else:
            result = result.index_select(axis, _nearest(old, new, input.device))
    return result


def _nearest(old: int, new: int, device: torch.device) -> Tensor:
    """Return the index of the element that each place of a resized axis takes."""
    # Sizes are made tensors by arange, the one way that stays dynamic in every export.
    exact = {"dtype": torch.float32, "device": device}
    scale = torch.arange(old, old + 1, **exact) / torch.arange(new, new + 1, **exact)  # type: ignore[call-overload]
    places = torch.floor(torch.arange(new, **exact) * scale)  # type: ignore[call-overload]
    return places.to(torch.int64).clamp(max=old - 1)


def _floor_divide(input: Any, other: Any, **options: Any) -> Any:  # noqa: A002, ANN401
    if options or not _whole(input) or not (_whole(other) or type(other) is int):
        return NotImplemented
    if not isinstance(other, Tensor):
        return -input if other == -1 else _floor(input, other)
    return torch.where(other == -1, -input, _floor(input, _harmless(other)))


def _floor(input: Tensor, other: Any) -> Any:  # noqa: A002, ANN401
    quotient = torch.div(input, other, rounding_mode="trunc")
    rest = input - quotient * other
    if isinstance(other, Tensor):
        lower = torch.logical_xor(rest < 0, other < 0) & (rest != 0)
    else:
        lower = rest < 0 if other > 0 else rest > 0
    return quotient - lower.to(quotient.dtype)


def _divide(
    input: Any,  # noqa: A002, ANN401
    other: Any,  # noqa: ANN401
    *,
    rounding_mode: str | None = None,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    return _floor_divide(input, other, **options) if rounding_mode == "floor" else NotImplemented


def _remainder(input: Any, other: Any, **options: Any) -> Any:  # noqa: A002, ANN401
    if options or not (_whole(input) and _whole(other)):
        return NotImplemented
    return torch.remainder(input, _harmless(other))


def _fmod(input: Any, other: Any, **options: Any) -> Any:  # noqa: A002, ANN401
    if options or not (_whole(input) and _whole(other)):
        return NotImplemented
    return torch.fmod(input, _harmless(other))


def _harmless(divisor: Tensor) -> Tensor:
    """Return divisors with 1 in place of -1, which leaves the same rest: none."""
    return torch.where(divisor == -1, torch.ones_like(divisor), divisor)


def _right_shift(input: Any, other: Any) -> Any:  # noqa: A002, ANN401
    return _floor_divide(input, 1 << other) if type(other) is int else NotImplemented


def _whole(value: Any) -> bool:  # noqa: ANN401
    """Whether it is a tensor of integers; sizes are such without axes while tracing."""
    if not isinstance(value, Tensor) or value.dtype is torch.bool:
        return False
    return value.dim() > 0 and not value.is_floating_point() and not value.is_complex()
