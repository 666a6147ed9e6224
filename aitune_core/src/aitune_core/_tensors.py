"""Facts about tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

__all__ = ["computable", "plain_tensor", "same_bits", "share_memory", "version_of"]


def computable(tensor: Tensor) -> bool:
    """Whether PyTorch computes with its real or complex numbers; float8 it only stores."""
    fractions = tensor.is_floating_point() or tensor.is_complex()
    return fractions and tensor.dtype.itemsize > 1


def plain_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is dense memory that a runtime can read, and no subclass."""
    return (
        type(tensor) in {Tensor, nn.Parameter, nn.Buffer}
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type in {"cpu", "cuda"}
    )


def same_bits(tensor: Tensor, copy: Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits, so that NaN counts as equal."""
    return tensor.shape == copy.shape and torch.equal(_bits(tensor), _bits(copy))


def _bits(tensor: Tensor) -> Tensor:
    values = tensor.detach().resolve_conj().resolve_neg()
    # A tensor of one element counts as contiguous whatever its stride, but view() looks.
    return values.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def version_of(tensor: Tensor) -> int:
    """Return PyTorch's count of writes to a tensor; 0 for those that have none."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def share_memory(tensors: Sequence[Tensor], written: Collection[int]) -> bool:
    """Whether one of the ``written`` tensors, by index, shares its storage with another one."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return any(storages[index] and storages.count(storages[index]) > 1 for index in written)
