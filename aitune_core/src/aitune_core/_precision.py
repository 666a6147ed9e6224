"""TF32: where eager itself computes float32 with fewer bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["exact_float32", "full_float32", "reduced_matmul"]


def reduced_matmul(device: torch.device) -> bool:
    """Whether PyTorch may multiply float32 matrices in TF32 on ``device``; not by default."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


@contextlib.contextmanager
def full_float32() -> Iterator[bool]:
    """Let convolutions and recurrent layers on CUDA compute in full float32 inside the block.

    They use TF32 by default. Yields whether it was switched off: not where it was off before, and
    not where the program set it through PyTorch's newer settings, which must not be mixed.
    """
    try:
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
    except RuntimeError:
        yield False
        return
    try:
        yield bool(before)
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Let nothing compute float32 with fewer bits inside the block, matrix products neither.

    Settings that the program made through PyTorch's newer interface stay.
    """
    with full_float32():
        try:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
        except RuntimeError:
            yield
            return
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
