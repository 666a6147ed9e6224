"""Results of PyTorch code that belong to the caller, and the modes that it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["inference", "memory_of", "owned", "state_memory"]


def memory_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the address of each tensor's storage; 0 where it has no memory."""
    return [
        tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        for tensor in tensors
    ]


def state_memory(module: nn.Module) -> frozenset[int]:
    """Return the addresses of all tensors that a module holds, as attributes of its parts too."""
    held = [leaf for part in module.modules() for leaf in pytree.tree_leaves(vars(part))]
    return frozenset(memory_of([leaf for leaf in held if isinstance(leaf, Tensor)])) - {0}


def owned(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], held: Collection[int]
) -> list[Tensor]:
    """Return outputs, with copies of those that share memory with others or with one another.

    Args:
        outputs: What was computed.
        inputs: What it was computed from.
        held: Addresses of storages that are not the caller's, such as those of weights.
    """
    taken = set(memory_of(inputs)) - {0}
    results = []
    for output, address in zip(outputs, memory_of(outputs), strict=True):
        results.append(output.clone() if address in taken or address in held else output)
        if address:
            taken.add(address)
    return results


@contextlib.contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """Compute no gradients, and with the types that the code names, whatever the caller's modes."""
    kind = device.type
    with (
        torch.no_grad(),
        torch.autocast(kind, enabled=False)
        if torch.is_autocast_enabled(kind)
        else contextlib.nullcontext(),
    ):
        yield
