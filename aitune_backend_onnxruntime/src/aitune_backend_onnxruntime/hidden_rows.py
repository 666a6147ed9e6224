"""Rows of attention of which a mask hides every key: what eager gives, and masks that give it."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Hiding", "hiding"]

#: Lengths of queries and keys to try eager with.
_LENGTH: Final = 16
#: What PyTorch adds for False before cuDNN's attention; scores outlast it in float32.
_CUDNN_FALSE: Final = -65504.0
#: ONNX Runtime's CUDA kernels give zeros for rows of -1e30 and lower.
_CUDA_FLOOR: Final = -1e20


@attrs.frozen(kw_only=True)
class Hiding:
    """How rows come out of which a mask hides every key.

    Attributes:
        limit: Eager gives zeros for rows of numbers up to this one.
        floor: Lower ones, down to the limit, rise to this, so that ONNX Runtime gives no zeros.
        false: What False adds to scores in eager; infinite where it leaves nothing of them.
    """

    limit: float
    floor: float
    false: float

    def mask(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a mask with which ONNX Runtime gives what eager gives with this one.

        Args:
            mask: Bools, or numbers to add to scores.
            dtype: Of queries; numbers instead of bools have it, too.
        """
        if mask.is_floating_point():
            wide = _comparable(mask)
            floor = _number(self.floor, wide.dtype, wide)
            raised = torch.where((wide > self.limit) & (wide < floor), floor, wide)
            return raised.to(mask.dtype)
        if math.isinf(self.false):
            return mask
        return torch.where(
            mask, _number(0.0, dtype, mask), _number(max(self.false, self.floor), dtype, mask)
        )

    def hidden(self, mask: Tensor) -> Tensor:
        """Return which rows of a mask of numbers are zeros in eager, with one column."""
        return (_comparable(mask) <= self.limit).all(-1, keepdim=True)


def hiding(query: Tensor, key: Tensor, mask: Tensor, **options: Any) -> Hiding:  # noqa: ANN401
    """Return how rows that a mask hides wholly come out.

    Kernels differ on CUDA. Which one eager takes is up to PyTorch, so eager is tried.

    Args:
        query: At least length and width.
        key: As query.
        mask: Only its dtype counts.
        options: What else attention was called with: ``scale``, ``enable_gqa``.
    """
    numbers = torch.finfo(mask.dtype if mask.is_floating_point() else query.dtype)
    # The lowest number itself is taken for an infinity.
    floor = numbers.min + numbers.eps * (numbers.max / (2 - numbers.eps))
    if query.device.type != "cuda":
        return Hiding(limit=-math.inf, floor=floor, false=-math.inf)
    # A thread of its own has no export or trace that would follow.
    with ThreadPoolExecutor(1) as thread:
        zeros = thread.submit(_zeros, query, key, mask.dtype, options).result()
    return Hiding(
        # Such kernels take powers of 2, at which lower numbers become infinite.
        limit=numbers.min * math.log(2) if zeros and mask.is_floating_point() else -math.inf,
        floor=max(floor, _CUDA_FLOOR),
        false=-math.inf if zeros else _CUDNN_FALSE,
    )


def _zeros(query: Tensor, key: Tensor, mask: torch.dtype, options: dict[str, Any]) -> bool:
    """Whether eager gives zeros for rows of the lowest number, or of False."""
    device = query.device
    queries, keys = (
        torch.ones(
            *(*(1,) * (part.dim() - 3), *map(_size, part.shape[-3:-2]), _LENGTH),
            _size(part.shape[-1]),
            dtype=query.dtype,
            device=device,
        )
        for part in (query, key)
    )
    lowest = torch.finfo(mask).min if mask.is_floating_point else 0
    hidden = torch.full((_LENGTH, _LENGTH), lowest, dtype=mask, device=device)
    return not functional.scaled_dot_product_attention(queries, keys, keys, hidden, **options).any()


def _comparable(mask: Tensor) -> Tensor:
    # ONNX Runtime compares no bfloat16.
    return mask.float() if mask.dtype == torch.bfloat16 else mask


def _size(size: int | torch.SymInt) -> int:
    return size if type(size) is int else 1


def _number(number: float, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.full((), number, dtype=dtype, device=like.device)
