"""Devices: what users write, turned into one that exists here; moves that nothing can follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from aitune_core.errors import ConfigError

__all__ = ["check_stays", "default_device", "existing_device", "known_device"]


_KINDS: Final = ("cpu", "cuda")


def default_device() -> torch.device:
    """Return the current CUDA device when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def known_device(device: torch.device | str) -> torch.device:
    """Return a device of a kind that can be used where there is one.

    Raises:
        ConfigError: It is no device, or of another kind.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        found = None
    if found is None or found.type not in _KINDS:
        msg = f"device must be 'cpu', 'cuda' or one such as 'cuda:1', got {device!r}"
        raise ConfigError(msg, field="device", value=device, allowed=_KINDS)
    return found


def existing_device(device: torch.device | str) -> torch.device:
    """Return a device of this machine, with an index for CUDA and none for the CPU.

    Raises:
        ConfigError: There is no such device here.
    """
    found = known_device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        msg = f"device {str(found)!r} is not available: there is no CUDA device here; use 'cpu'"
        raise ConfigError(msg, field="device", value=device, allowed="an available device")
    index: int | None = found.index
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        msg = f"device {str(found)!r} does not exist, there are {count} CUDA devices"
        raise ConfigError(msg, field="device", value=device, allowed="an existing device")
    return torch.device("cuda", index)


def check_stays(
    name: str, device: torch.device, dtype: torch.dtype, change: Callable[[Tensor], Tensor]
) -> None:
    """Check that a move or a conversion leaves a module without weights as it is.

    Args:
        name: Name of the module.
        device: Where its engines run.
        dtype: Element type in which they compute.
        change: What is to be done to each weight.

    Raises:
        ConfigError: Weights of this device and type would be others afterwards.
    """
    stays = f"module {name!r} has no weights here and runs on {device} in {dtype}, as tuned"
    step = "make, move and tune the module anew, or load its file with device="
    allowed = f"{device}, {dtype}"
    try:
        changed = change(torch.empty(0, dtype=dtype, device=device))
    except Exception as error:
        msg = f"{stays}; it cannot be moved or converted: {error}; {step}"
        raise ConfigError(msg, field="device", value=None, allowed=allowed) from error
    if changed.device != device:
        msg = f"{stays}; it cannot be moved to {changed.device}; {step}"
        raise ConfigError(msg, field="device", value=changed.device, allowed=allowed)
    if changed.dtype != dtype:
        msg = f"{stays}; it cannot be converted to {changed.dtype}; {step}"
        raise ConfigError(msg, field="dtype", value=changed.dtype, allowed=allowed)
