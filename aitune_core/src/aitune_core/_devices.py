"""Devices: what users write, turned into one that exists here."""

from __future__ import annotations

import torch

from aitune_core.errors import ConfigError

__all__ = ["default_device", "existing_device"]


def default_device() -> torch.device:
    """Return the current CUDA device when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def existing_device(device: torch.device | str) -> torch.device:
    """Return a device of this machine, with an index for CUDA and none for the CPU.

    Raises:
        ConfigError: There is no such device here.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        msg = f"device must be a torch device such as 'cuda' or 'cpu', got {device!r}"
        raise ConfigError(msg, field="device", value=device, allowed="a torch device") from error
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type != "cuda" or count == 0:
        have = f"{count} CUDA devices" if count else "no CUDA device"
        known = "" if found.type == "cuda" else "only cuda and cpu are supported, and "
        msg = f"device {str(found)!r} is not available: {known}there is {have} here; use 'cpu'"
        raise ConfigError(msg, field="device", value=device, allowed="an available device")
    index: int | None = found.index
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        msg = f"device {str(found)!r} does not exist, there are {count} CUDA devices"
        raise ConfigError(msg, field="device", value=device, allowed="an existing device")
    return torch.device("cuda", index)
