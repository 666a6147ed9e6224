"""Copies between the caller's tensors and those that a session or a CUDA graph is bound to."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Key", "Stage", "StageCache", "copied", "copy_all", "key_of"]

Key: TypeAlias = "tuple[torch.Size, ...]"

_SHAPE: Final = operator.attrgetter("shape")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
#: Shapes with stages, and stages per shape: one for each thread that calls at the same time.
_MAX_SHAPES: Final = 64
_MAX_STAGES: Final = 8


def key_of(inputs: Sequence[Tensor]) -> Key:
    """Return the shapes of inputs."""
    return tuple(map(_SHAPE, inputs))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source, of any strides, to its target; no gradients are recorded."""
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, sources)):
        with torch.no_grad():
            copy_all(targets, sources)
    elif len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)  # one step for all that are alike


def copied(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies that are the caller's."""
    if len(tensors) == 1:
        return [tensors[0].clone()]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


@attrs.frozen(eq=False)
class Stage:
    """Tensors that a binding of a session points to.

    Attributes:
        inputs: Read by a run, in the order of the session's inputs.
        outputs: Written by a run, in the order of the session's outputs.
        binding: Bound to both.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    binding: Any


class StageCache:
    """Stages that no call uses right now, by input shapes. Threads need no lock."""

    def __init__(self) -> None:
        self._free: dict[Key, list[Stage]] = {}

    def take(self, key: Key) -> Stage | None:
        """Return a stage, which is then the caller's alone until it is given back."""
        free = self._free.get(key)
        try:
            return free.pop() if free else None
        except IndexError:  # another thread took the last one this moment
            return None

    def give(self, key: Key, stage: Stage) -> None:
        """Put a stage back, or a new one in, if there is room for it."""
        free = self._free.get(key)
        if free is None and len(self._free) < _MAX_SHAPES:
            free = self._free.setdefault(key, [])
        if free is not None and len(free) < _MAX_STAGES:
            free.append(stage)
