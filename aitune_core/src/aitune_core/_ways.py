"""Other ways to make one and the same call, which an engine cannot tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from aitune_core._calls import Writing
from aitune_core._flat import FlatModule
from aitune_core._scalars import scalar_kinds
from aitune_core._synthesis import strided_copies
from aitune_core._tensors import computable
from aitune_core.errors import ValidationError
from aitune_core.specs import GraphSpec

__all__ = ["other_ways"]

#: How many pairs of inputs are given as one object.
_MAX_PAIRS: Final = 6

#: What a way gives, and what it has to give; None stands for what the plain way gives.
_Results: TypeAlias = tuple[tuple[Tensor, ...] | ValidationError, tuple[Tensor, ...] | None]


def other_ways(
    module: FlatModule, graph: GraphSpec, inputs: Sequence[Tensor]
) -> Iterator[tuple[str, _Results]]:
    """Yield ways of a call in words, and what the module gives; ways that it refuses are left out.

    Args:
        module: The eager module.
        graph: The graph.
        inputs: Flat inputs of a call; copies of them are used.
    """
    ways: list[tuple[str, bool, Sequence[Tensor], Writing]] = [
        ("with all arguments by keyword", False, _copies(inputs), "keywords"),
        ("with arguments by position", False, _copies(inputs), "positions"),
        ("with inputs of other strides", False, strided_copies(inputs), "short"),
        ("with gradients enabled", True, _copies(inputs), "short"),
        ("with inputs that require grad", False, _requiring_grad(inputs), "short"),
    ]
    for way, grad, given, writing in ways:
        with torch.set_grad_enabled(grad):
            outputs = _tried(module, given, writing)
        if outputs is not None:
            yield way, (outputs, None)
    yield from _with_one_object(module, graph, inputs)


def _with_one_object(
    module: FlatModule, graph: GraphSpec, inputs: Sequence[Tensor]
) -> Iterator[tuple[str, _Results]]:
    """Give the same values as separate tensors and as one."""
    with torch.no_grad():
        for places in _alike(graph, inputs):
            separate = _tried(module, _with_value(inputs, places))
            one = _tried(module, _with_value(inputs, places, shared=True))
            if one is None or separate is None or isinstance(separate, ValidationError):
                continue
            paths = " and ".join(graph.inputs[place].path for place in places)
            yield f"with {paths} as one tensor object", (one, separate)


def _alike(graph: GraphSpec, inputs: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return places of inputs that may be one tensor: all of a kind, and some pairs."""
    # Values of integers are not moved about: an index may be out of range in another place.
    kinds: dict[tuple[object, ...], list[int]] = {}
    numbers = scalar_kinds(graph.call_structure)
    for place, tensor in enumerate(inputs):
        if place in numbers or place in graph.mutated_inputs:
            continue
        if tensor.is_floating_point():
            kinds.setdefault((tensor.dtype, tensor.shape, tensor.device), []).append(place)
    groups = [tuple(places) for places in kinds.values() if len(places) > 1]
    pairs = [pair for places in groups for pair in itertools.combinations(places, 2)]
    return [*groups, *(pair for pair in pairs[:_MAX_PAIRS] if pair not in groups)]


def _with_value(
    inputs: Sequence[Tensor], places: Sequence[int], *, shared: bool = False
) -> list[Tensor]:
    """Return copies of inputs, with the value of the first place in all of them."""
    own = _copies(inputs)
    for place in places[1:]:
        own[place] = own[places[0]] if shared else own[places[0]].clone()
    return own


def _copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in inputs]


def _requiring_grad(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone().requires_grad_(computable(tensor)) for tensor in inputs]


def _tried(
    module: FlatModule, inputs: Sequence[Tensor], writing: Writing = "short"
) -> tuple[Tensor, ...] | ValidationError | None:
    try:
        return tuple(tensor.detach() for tensor in module.run(inputs, writing))
    except ValidationError as error:
        return error
    except Exception:  # noqa: BLE001 - of the user's module: it does not take the call so
        return None
