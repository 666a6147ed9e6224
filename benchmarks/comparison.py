"""Results of a contender compared with eager's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["WrongResultError", "difference", "tensors"]

#: Allowed difference as a share of the largest value of an output, by element type.
_SHARES: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class WrongResultError(ValueError):
    """A result is not eager's."""


def tensors(result: object) -> list[Tensor]:
    """Return copies of the tensors in a result, on the CPU."""
    found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return [tensor.detach().to("cpu", copy=True) for tensor in found]


def difference(expected: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest absolute difference and what is allowed.

    Both are of the output that comes closest to what is allowed.

    Args:
        expected: Eager's tensors, floating-point, in one of the element types of `benchmarks.plan`.
        got: The contender's, in the same order.

    Raises:
        WrongResultError: Number, shape, element type or values differ.
    """
    facts = [[(tuple(tensor.shape), tensor.dtype) for tensor in each] for each in (expected, got)]
    if facts[0] != facts[1]:
        msg = f"wrong result: tensors {facts[1]}, eager gives {facts[0]}"
        raise WrongResultError(msg)
    found = []
    for wanted, value in zip(expected, got, strict=True):
        largest = float((value.double() - wanted.double()).abs().max())
        allowed = _SHARES[wanted.dtype] * float(wanted.double().abs().max())
        # Written so that NaN fails.
        if not largest <= allowed:
            msg = f"wrong result: differs from eager by {largest:.3g}, allowed is {allowed:.3g}"
            raise WrongResultError(msg)
        found.append((largest, allowed))
    return max(found, key=lambda pair: pair[0] / pair[1])
