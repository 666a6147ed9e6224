"""Recurrent layers by their shapes alone."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import _VF
from torch._subclasses.fake_tensor import FakeTensor

from aitune_backend_onnxruntime.patching import replaced_here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["recurrent_shapes"]

_FUNCTIONS: Final = ("gru", "lstm", "rnn_relu", "rnn_tanh")


@contextmanager
def recurrent_shapes() -> Iterator[None]:
    """Replace the functions of recurrent layers by ones that give results without values.

    On tensors of symbolic sizes, torch writes their steps out, which fixes the length. What is
    looked for are branches in the code around them. Tensors with data, such as those of other
    threads, get the real functions.
    """
    with contextlib.ExitStack() as stack:
        for name in _FUNCTIONS:
            function = _on_symbolic(getattr(_VF, name))
            stack.enter_context(replaced_here(_VF, name, function))
        yield


def _on_symbolic(real: Any) -> Any:  # noqa: ANN401 - torch's functions have no type
    def function(data: Tensor, *rest: Any) -> Any:  # noqa: ANN401
        return _shapes(data, *rest) if isinstance(data, FakeTensor) else real(data, *rest)

    return function


def _shapes(data: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    """Stand in for ``torch.gru(input, hx, weights, ...)`` and its like, also for packed input."""
    # Packed input comes with its batch sizes, plain input says last whether its batch is first.
    packed = isinstance(rest[2], list)
    states = rest[1] if packed else rest[0]
    states = states if isinstance(states, tuple | list) else (states,)
    bidirectional = rest[-1] if packed else rest[-2]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return data.new_empty((*data.shape[:-1], width)), *map(torch.clone, states)
