"""Calls out of what users pass as ``input_data``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from aitune_core._tensors import version_of
from aitune_core._trees import TreeError, flatten, unflatten
from aitune_core.errors import ConfigError

__all__ = ["Call", "calls_of", "resized_call", "to_device", "unchanged"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def calls_of(input_data: object, max_calls: int | None) -> Iterator[Call]:
    """Return the calls that ``input_data`` stands for.

    A tensor, a tuple of arguments, a mapping of keyword arguments and an ``(args, kwargs)`` pair
    are one call each; every other iterable holds calls, each in one of these forms or a list of
    arguments.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(input_data, Tensor | tuple | Mapping):
        elements: Iterable[object] = [input_data]
    elif isinstance(input_data, Iterable) and not isinstance(input_data, str | bytes):
        elements = input_data
    else:
        msg = (
            "input_data must be a tensor, a call or an iterable of calls such as a DataLoader, "
            f"got {type(input_data).__name__}"
        )
        raise ConfigError(msg, field="input_data", value=input_data, allowed="calls")
    for element in itertools.islice(
        elements, None if max_calls is None else min(max_calls, sys.maxsize)
    ):
        yield _call_of(element)


def _call_of(element: object) -> Call:
    if isinstance(element, Mapping):
        return (), _keywords(element)
    if isinstance(element, tuple | list):
        if len(element) == 2 and _is_pair(element):  # noqa: PLR2004
            return tuple(element[0]), _keywords(element[1])
        return tuple(element), {}
    return (element,), {}


def _is_pair(element: tuple[Any, ...] | list[Any]) -> bool:
    args, kwargs = element
    return isinstance(args, tuple | list) and isinstance(kwargs, Mapping)


def _keywords(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    for name in mapping:
        if not isinstance(name, str):
            msg = (
                f"a mapping in input_data stands for keyword arguments, got the key {name!r}; pass "
                "a dict argument as ((the_dict,), {})"
            )
            raise ConfigError(msg, field="input_data", value=name, allowed="str keys")
    return dict(mapping)


def to_device(call: Call, device: torch.device) -> Call:
    """Return the call with its tensors on ``device``."""
    return _mapped(call, lambda tensor: tensor.to(device))


def _mapped(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """Return the call with other tensors; objects that are no containers stay as they are."""
    tensors: list[Tensor] = []
    try:
        structure = flatten(call, tensors)
    except TreeError:
        mapped: Call = pytree.tree_map_only(Tensor, change, call)
        return mapped
    changed: Call = unflatten(structure, map(change, tensors))
    return changed


@contextmanager
def unchanged(call: Call) -> Iterator[None]:
    """Undo what the block writes to the tensors of a call: they are the user's."""
    tensors: list[Tensor] = []

    def gather(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _mapped(call, gather)
    copies = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, copy in copies:
                if version_of(tensor) != version:
                    tensor.copy_(copy)


def resized_call(call: Call, batch: int) -> Call:
    """Return the call with another batch: rows of its tensors sliced or repeated.

    The batch axis is axis 0 of every tensor that has as many rows as the first one.

    Raises:
        ConfigError: The call has no tensor with rows.
    """
    tensors: list[Tensor] = []

    def gather(tensor: Tensor) -> Tensor:
        if tensor.dim():
            tensors.append(tensor)
        return tensor

    _mapped(call, gather)
    rows = tensors[0].shape[0] if tensors else 0
    if rows == 0:
        what = "a first tensor of at least one row" if tensors else "tensors with a batch axis"
        msg = f"batch_sizes needs calls with {what}; give calls of these sizes in input_data"
        raise ConfigError(msg, field="batch_sizes", value=batch, allowed="batched calls")

    def resize(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            return tensor
        return tensor[torch.arange(batch, device=tensor.device) % rows]

    return _mapped(call, resize)
