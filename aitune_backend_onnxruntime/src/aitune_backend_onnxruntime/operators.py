"""Functions of torch that exporters write with other values, in forms that export right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from aitune_backend_onnxruntime import division, interpolation, stable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ExactOperators"]


class ExactOperators(TorchFunctionMode):
    """Replaces functions by forms with the same results, for the thread that enters it.

    A form that does not take the arguments of a call gives ``NotImplemented``, and the function
    itself runs. Forms run outside the mode, and so do the insides of torch's Python functions:
    ones that call a replaced function need a form of their own.

    Attributes:
        refused: Whether a form raised because no export would be right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused = False
        self._forms = {
            function: form
            for functions, form in _replacements()
            for function in functions
            if function is not None
        }

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - torch's functions have no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        form = self._forms.get(func) if kwargs.get("out") is None else None
        if form is not None:
            try:
                result = form(*args, **kwargs)
            except ValueError:
                self.refused = True
                raise
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _replacements() -> Iterable[tuple[tuple[Any, ...], Callable[..., Any]]]:
    tensor = torch.Tensor
    yield (functional.logsigmoid,), stable.log_sigmoid
    yield (functional.binary_cross_entropy_with_logits,), stable.cross_entropy_with_logits
    yield (torch.log1p, torch.special.log1p, tensor.log1p), stable.log1p
    yield (torch.expm1, torch.special.expm1, tensor.expm1), stable.expm1
    yield (torch.logaddexp, tensor.logaddexp), stable.log_add_exp
    yield (torch.atan2, torch.arctan2, tensor.atan2, tensor.arctan2), stable.atan2
    yield (tensor.atan2_, tensor.arctan2_), _in_place(stable.atan2)
    yield (tensor.expm1_,), _in_place(stable.expm1)
    yield (tensor.log1p_,), _in_place(stable.log1p)
    yield (functional.interpolate,), interpolation.interpolate

    yield (
        (torch.floor_divide, tensor.floor_divide, tensor.__floordiv__),
        division.floor_divide,
    )
    yield (tensor.__rfloordiv__,), _swapped(division.floor_divide)
    yield (tensor.floor_divide_, _method("__ifloordiv__")), _in_place(division.floor_divide)
    yield (
        (torch.div, torch.divide, tensor.div, tensor.divide, torch.true_divide),
        division.divide,
    )
    yield (tensor.div_, tensor.divide_), _in_place(division.divide)
    yield (
        (torch.remainder, tensor.remainder, _method("__mod__")),
        division.remainder,
    )
    yield (tensor.__rmod__,), _swapped(division.remainder)
    yield (tensor.remainder_, _method("__imod__")), _in_place(division.remainder)
    yield (torch.fmod, tensor.fmod), division.fmod
    yield (tensor.fmod_,), _in_place(division.fmod)
    yield (torch.trunc, torch.fix, tensor.trunc, tensor.fix), division.trunc
    yield (
        (
            torch.bitwise_right_shift,
            tensor.bitwise_right_shift,
            _method("__rshift__"),
        ),
        division.right_shift,
    )
    yield (tensor.__rrshift__,), _swapped(division.right_shift)
    yield (
        (tensor.bitwise_right_shift_, _method("__irshift__")),
        _in_place(division.right_shift),
    )


def _method(name: str) -> Any:  # noqa: ANN401
    return getattr(torch.Tensor, name, None)


def _swapped(form: Callable[..., Any]) -> Callable[..., Any]:
    def swapped(one: Any, other: Any) -> Any:  # noqa: ANN401
        return form(other, one)

    return swapped


def _in_place(form: Callable[..., Any]) -> Callable[..., Any]:
    def in_place(target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = form(target, *args, **kwargs)
        return result if result is NotImplemented else target.copy_(result)

    return in_place
