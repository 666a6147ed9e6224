"""Room: whether inputs of the largest declared sizes fit into memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from aitune_core._graphs import Axes, DynamicShapes
from aitune_core.errors import ConfigError
from aitune_core.specs import DynamicDim

__all__ = ["check_room", "naming_dims"]

#: What the CPU's allocator says; it has no error class of its own.
_CPU_WORDS: Final = "can't allocate memory"


def check_room(name: str, shapes: DynamicShapes, calls: Iterable[Mapping[str, Tensor]]) -> None:
    """Check that the inputs of a call of the largest declared sizes fit into memory.

    Args:
        name: Name of the module.
        shapes: Its explicit dims.
        calls: Tensors of recorded calls, by path.

    Raises:
        ConfigError: They are larger than all memory of the device.
    """
    for call in calls if shapes else ():
        largest: dict[torch.device, dict[str, int]] = {}
        for path, tensor in call.items():
            size = _largest_bytes(tensor, shapes.get(path))
            largest.setdefault(tensor.device, {})[path] = size
        for device, sizes in largest.items():
            needed, memory = sum(sizes.values()), _memory(device)
            if memory is None or needed <= memory:
                continue
            path = max(sizes, key=sizes.__getitem__)
            dims = ", ".join(_dims(shapes)) or "as recorded"
            msg = (
                f"module {name!r}: the inputs of one call at the maximum of its dims ({dims}) need "
                f"{_amount(needed)}, most of it for {path!r}, and {device} has "
                f"{_amount(memory)}; engines are checked at the maximum, so declare a smaller one"
            )
            raise ConfigError(
                msg, field="dynamic_shapes", value=needed, allowed=f"at most {memory} bytes"
            )


@contextlib.contextmanager
def naming_dims(name: str, shapes: DynamicShapes) -> Iterator[None]:
    """Say which declared sizes are too large where the block runs out of memory.

    Raises:
        ConfigError: In place of the allocator's error.
    """
    try:
        yield
    except RuntimeError as error:
        dims = list(_dims(shapes))
        if not dims or not (isinstance(error, torch.OutOfMemoryError) or _CPU_WORDS in str(error)):
            raise
        msg = (
            f"module {name!r} ran out of memory at sizes of its dims ({', '.join(dims)}): {error}; "
            "engines are checked at the maximum, so declare a smaller one"
        )
        raise ConfigError(
            msg, field="dynamic_shapes", value=dims, allowed="sizes that fit into memory"
        ) from error


def _pairs(axes: Axes) -> Iterable[tuple[int, DynamicDim | int | None]]:
    return axes.items() if isinstance(axes, Mapping) else enumerate(axes)


def _dims(shapes: DynamicShapes) -> dict[str, None]:
    """The declared dims in words, each once."""
    return {
        str(dim): None
        for axes in shapes.values()
        for _, dim in _pairs(axes)
        if isinstance(dim, DynamicDim)
    }


def _largest_bytes(tensor: Tensor, axes: Axes | None) -> int:
    sizes = list(tensor.shape)
    for axis, dim in _pairs(axes or {}):
        if isinstance(dim, DynamicDim) and -len(sizes) <= axis < len(sizes):
            sizes[axis] = dim.max
    total = tensor.element_size()
    for size in sizes:
        total *= size
    return total


def _memory(device: torch.device) -> int | None:
    """All memory of a device in bytes; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None


def _amount(count: int) -> str:
    """Return a number of bytes in words."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:  # noqa: PLR2004
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
