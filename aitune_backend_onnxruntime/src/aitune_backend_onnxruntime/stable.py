"""Functions whose usual ONNX form overflows, or takes another sign, far from common values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["atan2", "cross_entropy_with_logits", "expm1", "log1p", "log_add_exp", "log_sigmoid"]


def log1p(value: Tensor) -> Any:  # noqa: ANN401
    """Return what ``torch.log1p`` does; exporters add 1, at which small numbers are lost."""
    if not value.is_floating_point():
        return NotImplemented
    wide = value if value.dtype == torch.float64 else value.to(torch.float32)
    total = 1 + wide
    step = total - 1
    # What was lost in the sum is made up for by the share of it that was kept.
    share = torch.where((step == 0) | torch.isinf(step), 1.0, wide / step)
    return torch.where(step == 0, wide, torch.log(total) * share).to(value.dtype)


def expm1(value: Tensor) -> Any:  # noqa: ANN401
    """Return what ``torch.expm1`` does; exporters subtract 1, at which small numbers are lost."""
    if not value.is_floating_point():
        return NotImplemented
    wide = value if value.dtype == torch.float64 else value.to(torch.float32)
    power = torch.exp(wide)
    step = power - 1
    # Near 1, the logarithm of the rounded power tells which number the step is right for.
    near = (torch.abs(wide) < 1) & (step != 0)
    share = torch.where(near, wide / torch.log(torch.where(near, power, 2.0)), 1.0)
    return torch.where(step == 0, wide, step * share).to(value.dtype)


def log_sigmoid(value: Tensor) -> Any:  # noqa: ANN401
    """Return what ``logsigmoid`` does; exporters take the logarithm of what has become zero."""
    return torch.where(value < 0, value, 0) - log1p(torch.exp(-torch.abs(value)))


def cross_entropy_with_logits(  # noqa: PLR0913, PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Any:  # noqa: ANN401
    """Return what ``binary_cross_entropy_with_logits`` does."""
    if size_average is not None or reduce is not None or input.shape != target.shape:
        return NotImplemented
    log = log_sigmoid(input)
    if pos_weight is not None:
        log = log * (1 + (pos_weight - 1) * target)
    loss = (1 - target) * input - log
    if weight is not None:
        loss = loss * weight
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


def log_add_exp(one: Tensor, other: Tensor) -> Any:  # noqa: ANN401
    """Return what ``torch.logaddexp`` does."""
    if not torch.result_type(one, other).is_floating_point:
        return NotImplemented
    larger = torch.maximum(one, other)
    # The distance of equal infinities is no number.
    apart = torch.where(one == other, 0.0, torch.abs(one - other))
    return larger + log1p(torch.exp(-apart)).to(larger.dtype)


def atan2(one: Tensor, other: Tensor) -> Any:  # noqa: ANN401
    """Return what ``torch.atan2`` does in all quadrants, for signed zeros and infinities too."""
    dtype = torch.result_type(one, other)
    if dtype.is_complex:
        return NotImplemented
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y, x = one.to(dtype).to(wide), other.to(dtype).to(wide)
    height, width = torch.abs(y), torch.abs(x)
    steep = height > width
    longer = torch.where(steep, height, width)
    ratio = torch.where(steep, width, height) / torch.where(longer == 0, 1.0, longer)
    ratio = torch.where((height == width) & (longer != 0), 1.0, ratio)
    angle = torch.atan(ratio)
    angle = torch.where(steep, math.pi / 2 - angle, angle)
    angle = torch.where(_is_negative(x), math.pi - angle, angle)
    angle = torch.where(_is_negative(y), -angle, angle)
    return torch.where((y != y) | (x != x), y + x, angle).to(dtype)  # noqa: PLR0124 - no number


def _is_negative(value: Tensor) -> Tensor:
    """Return the sign bit, which of zeros only their inverse shows."""
    return (value < 0) | ((value == 0) & (1 / value < 0))
