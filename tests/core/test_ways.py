"""Modules to which the way of a call matters are refused: an engine does not see it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from samples import recorded
from torch import Tensor, nn

from aitune_core import RecordingError
from aitune_core._graphs import RecordedGraph
from aitune_core._reference import Reference

X, Y = torch.rand(3, 3) + 1, torch.rand(3, 3) + 2


def reference(graph: RecordedGraph) -> Reference:
    return Reference(graph.spec, graph.samples, graph.results, graph.reference, "net")


def refused(module: Any, *calls: Any) -> str:
    (graph,) = recorded(module, *calls)
    with pytest.raises(RecordingError) as caught:
        reference(graph).cases()
    assert (caught.value.module_name, caught.value.path) == ("net", "out")
    return str(caught.value)


def same_object(q: Tensor, k: Tensor) -> Tensor:
    return q * 2 if k is q else q * 3


def test_one_object_twice_that_was_recorded() -> None:
    assert "with copies of the tensors of recorded call 0" in refused(same_object, (X, X))


def test_one_object_twice_that_was_not_recorded() -> None:
    assert "with q and k as one tensor object" in refused(same_object, (X, Y))


def test_pair_of_three_as_one_object() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * 2 if k is v and q is not k else q * 3

    assert "with k and v as one tensor object" in refused(forward, (X, Y, X + 7))


def test_attention_that_asks_for_identity_without_need_is_taken() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x = torch.rand(2, 3, 4)
    (graph,) = recorded(attention, (x, x, x))
    assert len(reference(graph).cases()) > 2


def test_strides() -> None:
    def forward(x: Tensor) -> Tensor:
        return x * 2 if x.is_contiguous() else x * 3

    assert "with inputs of other strides" in refused(forward, (X,))
    assert "with copies" in refused(forward, (torch.rand(3, 3, 2)[..., 0],))


def test_grad_mode() -> None:
    assert "with gradients enabled" in refused(
        lambda x: x * 2 if torch.is_grad_enabled() else x * 3, (X,)
    )


def test_requires_grad() -> None:
    assert "with inputs that require grad" in refused(
        lambda x: x * 2 if x.requires_grad else x * 3, (X,)
    )


def _counting(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * len(args)

    return wrapper


def test_decorator_that_counts_arguments() -> None:
    @_counting
    def forward(x: Tensor) -> Tensor:
        return x + 1

    assert "with copies of the tensors" in refused(forward, (X,))


def _asking(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * (5 if "scale" in kwargs else 7)

    return wrapper


def test_decorator_that_looks_for_a_default() -> None:
    @_asking
    def forward(x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    assert "with all arguments by keyword" in refused(forward, (X,))


@dataclasses.dataclass
class Batch:
    """A dataclass that gets a further attribute."""

    x: Tensor


def test_attributes_outside_of_the_fields_are_refused() -> None:
    batch = Batch(X)
    batch.scale = 3.0  # type: ignore[attr-defined]
    with pytest.raises(RecordingError, match="'scale', which is no field") as caught:
        recorded(lambda batch: batch.x * batch.scale, (batch,))
    assert caught.value.path == "batch"


def test_values_that_eager_gave_are_the_reference() -> None:
    calls: list[int] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return x * (2 if len(calls) == 1 else 3)

    assert "recorded call 0" in refused(forward, (X,))
