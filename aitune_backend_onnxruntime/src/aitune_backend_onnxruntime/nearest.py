"""Nearest interpolation with torch's choice of neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["interpolate"]

#: Batch and channels come before the sizes.
_LEADING = 2


def interpolate(  # noqa: PLR0913, PLR0917 - as torch's
    input: Tensor,  # noqa: A002
    size: Any = None,  # noqa: ANN401
    scale_factor: Any = None,  # noqa: ANN401
    mode: str = "nearest",
    align_corners: bool | None = None,  # noqa: FBT001
    recompute_scale_factor: bool | None = None,  # noqa: FBT001
    antialias: bool = False,  # noqa: FBT001, FBT002
) -> Any:  # noqa: ANN401
    """Return what ``interpolate`` does to a given size.

    ONNX divides by the factor between the sizes where torch multiplies by its inverse, and takes
    another element where their roundings differ. Factors that are known to be whole are left alone.
    """
    if mode not in {"nearest", "nearest-exact"} or size is None or scale_factor is not None:
        return NotImplemented
    if align_corners is not None or recompute_scale_factor or antialias:
        return NotImplemented
    spatial = input.dim() - _LEADING
    sizes = list(size) if isinstance(size, list | tuple) else [size] * spatial
    if len(sizes) != spatial:
        return NotImplemented
    pairs = list(zip(input.shape[_LEADING:], sizes, strict=True))
    if mode == "nearest" and all(_is_whole(old, new) for old, new in pairs):
        return NotImplemented
    offset = 0.5 if mode == "nearest-exact" else 0.0
    for axis, (old, new) in enumerate(pairs, _LEADING):
        if not _is_same(old, new):
            input = input.index_select(axis, _sources(old, new, offset, input.device))  # noqa: A001
    return input


def _is_whole(old: Any, new: Any) -> bool:  # noqa: ANN401
    return type(old) is int and type(new) is int and old > 0 and new % old == 0


def _is_same(old: Any, new: Any) -> bool:  # noqa: ANN401
    return type(old) is int and type(new) is int and old == new


def _sources(old: Any, new: Any, offset: float, device: torch.device) -> Tensor:  # noqa: ANN401
    """Return the source of each element, computed in float32 as torch's kernels do."""
    before, after = (_number(size, device) for size in (old, new))
    places = torch.arange(new, device=device).to(torch.float32)
    if offset:
        places = places + offset
    sources = torch.floor(places * (before / after))
    # Not a clamp, which ONNX Runtime has for few types.
    return torch.where(sources < before, sources, before - 1).to(torch.int64)


def _number(size: Any, device: torch.device) -> Tensor:  # noqa: ANN401
    # While a trace is made, sizes are tensors.
    if isinstance(size, Tensor):
        return size.to(device=device, dtype=torch.float32)
    return torch.full((), size, dtype=torch.float32, device=device)
