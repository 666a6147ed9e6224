"""Interpolation to torch's sizes, and to nearest neighbours of torch's choice."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["interpolate"]

#: Sizes up to this are known to be scaled right, by ratios of small numbers.
_LARGEST_SIZE = 2**20
_LARGEST_DENOMINATOR = 10_000
#: Batch and channels come before the sizes.
_LEADING = 2
#: Sizes of an image.
_IMAGE = 2

#: An old size, a new one, and the factor between them where torch heeds it.
_Way: TypeAlias = tuple[Any, Any, float | None]


def interpolate(  # noqa: PLR0913, PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    size: Any = None,  # noqa: ANN401
    scale_factor: Any = None,  # noqa: ANN401
    mode: str = "nearest",
    align_corners: bool | None = None,  # noqa: FBT001
    recompute_scale_factor: bool | None = None,  # noqa: FBT001
    antialias: bool = False,  # noqa: FBT001, FBT002
) -> Any:  # noqa: ANN401
    """Return what ``interpolate`` does with nearest neighbours; other modes are left alone.

    ONNX divides by the factor between the sizes where torch multiplies by its inverse, and takes
    another element where their roundings differ. Factors that are known to be whole are left alone.

    Raises:
        ValueError: An export would give sizes that vary another size than torch does.
    """
    if (size is None) == (scale_factor is None) or (recompute_scale_factor and size is not None):
        return NotImplemented
    spatial = input.dim() - _LEADING
    given = size if scale_factor is None else scale_factor
    numbers = list(given) if isinstance(given, list | tuple) else [given] * spatial
    olds = input.shape[_LEADING:]
    if len(numbers) != spatial:
        return NotImplemented
    if mode not in {"nearest", "nearest-exact"} or align_corners is not None or antialias:
        if scale_factor is not None:
            for old, number in zip(olds, numbers, strict=True):
                _check_rounding(old, number)
        return NotImplemented
    factors: list[float | None] = [None] * spatial
    if scale_factor is not None:
        if not recompute_scale_factor:
            factors = [float(number) for number in numbers]
        numbers = [_scaled(old, number) for old, number in zip(olds, numbers, strict=True)]
    ways: list[_Way] = list(zip(olds, numbers, factors, strict=True))
    return _nearest(input, ways, exact=mode == "nearest-exact")


def _nearest(input: Tensor, ways: list[_Way], *, exact: bool) -> Any:  # noqa: A002, ANN401
    """Take the nearest neighbours along axes with an old size, a new one and perhaps a factor."""
    if not exact and all(_is_whole(*way) for way in ways):
        return NotImplemented
    steps = _steps(ways, input.device, exact=exact)
    for axis, ((old, new, factor), step) in enumerate(zip(ways, steps, strict=True), _LEADING):
        if factor is not None or not _is_same(old, new):
            places = _sources(old, new, step, exact=exact)
            input = input.index_select(axis, places)  # noqa: A001
    return input


def _steps(ways: list[_Way], device: torch.device, *, exact: bool) -> list[Tensor]:
    """Return how far apart the sources of neighbours are along each axis, as torch's kernels do.

    The kernels for images have forms of their own that do not heed factors: along axes whose size
    stays, and on the CPU along those whose size doubles, but not for the exact mode there.
    """
    own_form = len(ways) == _IMAGE and (device.type == "cuda" or not exact)
    steps = []
    for old, new, factor in ways:
        before, after = (_number(size, device) for size in (old, new))
        ratio = before / after
        step = ratio if factor is None else torch.full_like(ratio, 1 / factor)
        if own_form:
            kept = after == before
            if device.type != "cuda":
                kept = kept | (after == 2 * before)
            step = torch.where(kept, ratio, step)
        steps.append(step)
    return steps


def _scaled(old: Any, factor: float) -> Any:  # noqa: ANN401
    if isinstance(old, int):
        return math.floor(old * factor)
    # Exporters scale sizes in float32; ratios of whole numbers are exact.
    ratio = Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
    sizes = np.arange(_LARGEST_SIZE)
    if not np.array_equal(np.floor(sizes * factor), sizes * ratio.numerator // ratio.denominator):
        raise _uneven(factor)
    return old * ratio.numerator // ratio.denominator


def _check_rounding(old: Any, factor: float) -> None:  # noqa: ANN401
    """Refuse a size that varies where float32, in which exporters scale it, rounds otherwise."""
    if isinstance(old, int):
        return
    sizes = np.arange(_LARGEST_SIZE)
    coarse = np.floor(sizes.astype(np.float32) * np.float32(factor))
    if not np.array_equal(coarse, np.floor(sizes * factor)):
        raise _uneven(factor)


def _uneven(factor: float) -> ValueError:
    return ValueError(
        f"interpolation by {factor} rounds sizes otherwise than an export does; give the size"
    )


def _is_whole(old: Any, new: Any, factor: float | None) -> bool:  # noqa: ANN401
    if factor is not None:
        return factor.is_integer()
    return type(old) is int and type(new) is int and old > 0 and new % old == 0


def _is_same(old: Any, new: Any) -> bool:  # noqa: ANN401
    return type(old) is int and type(new) is int and old == new


def _sources(old: Any, new: Any, step: Tensor, *, exact: bool) -> Tensor:  # noqa: ANN401
    """Return the source of each element, computed in float32 as torch's kernels do."""
    before = _number(old, step.device)
    places = torch.arange(new, device=step.device).to(torch.float32)
    if exact:
        places = places + 0.5
    sources = torch.floor(places * step)
    # Not a clamp, which ONNX Runtime has for few types.
    return torch.where(sources < before, sources, before - 1).to(torch.int64)


def _number(size: Any, device: torch.device) -> Tensor:  # noqa: ANN401
    if isinstance(size, Tensor):
        return size.to(device=device, dtype=torch.float32)
    return torch.full((), size, dtype=torch.float32, device=device)
