"""Where a run takes place: hardware and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata

import onnxruntime
import torch

__all__ = ["environment"]


def environment(device: str) -> dict[str, str]:
    """Describe the machine and the packages; starts no context on a CUDA device.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
    """
    found = {"device": f"CPU, {os.cpu_count()} cores"}
    if device == "cuda":
        card, driver = _card()
        found = {"device": card, "driver": driver, "CUDA": str(torch.version.cuda)}
    return {
        **found,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "onnxruntime": str(onnxruntime.__version__),
        **{name: _version(name) for name in ("transformers", "timm")},
    }


def _card() -> tuple[str, str]:
    """Return the names of the first card and its driver."""
    question = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(question, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not known: {error}", f"not known: {error}"
    name, _, driver = answer.splitlines()[0].rpartition(", ")
    return name, driver


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
