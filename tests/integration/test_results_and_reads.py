"""What is no tensor in results, and values that Python code reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Net(nn.Module):
    """A module whose forward is a function of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def _told(x: Tensor) -> Any:
    return {"y": x * 2, "kind": "long" if x.shape[0] > 10 else "short"}


@pytest.mark.parametrize("dynamo", [True, False])
def test_words_in_results_hold_for_the_sizes_that_have_them(tune: Tune, dynamo: bool) -> None:
    strategy = ait.OneBackendStrategy(("onnxruntime", {"use_dynamo": dynamo}))
    model = ait.Module(Net(_told), strategy=strategy)
    ait.tune(model, [torch.rand(4, 3), torch.rand(8, 3)])
    assert model(torch.rand(6, 3))["kind"] == "short"
    with pytest.raises(ait.TuningError, match="takes sizes with n "):
        ait.tune(
            ait.Module(
                Net(_told), strategy=strategy, dynamic_shapes={"x": {0: ait.DynamicDim("n", 1, 99)}}
            ),
            torch.rand(4, 3),
        )


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2, x.shape[0]),
        lambda x: (x * 2, f"{x.shape[0]} rows"),
        lambda x: {x.shape[0]: x * 2},
        lambda x: (x * 2, x.shape[0] / 2),
        lambda x: list(x.unbind(0)),
        lambda x: tuple(x * 2 for _ in range(x.shape[0])),
    ],
)
def test_sizes_in_results_are_refused(function: Any, dynamo: bool) -> None:
    strategy = ait.OneBackendStrategy(("onnxruntime", {"use_dynamo": dynamo}))
    shapes = {"x": {0: ait.DynamicDim("n", 1, 64)}}
    model = ait.Module(Net(function), strategy=strategy, dynamic_shapes=shapes)
    with pytest.raises(ait.TuningError):
        ait.tune(model, torch.rand(4, 3))
    assert model(torch.rand(9, 3)) is not None


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if torch.equal(x, x.abs()) else x * 3,
        lambda x: x * 2 if torch.allclose(x, x.abs()) else x * 3,
        lambda x: x * round(x[0, 0].item()),
        lambda x: (x + 1, bool((x > 0).any())),
        lambda x: x * len(repr(x)),
        lambda x: x * float(np.from_dlpack(x.detach().cpu()).max()),
        lambda x: x * copy.deepcopy(x).max().item(),
        lambda x: x * x.untyped_storage()[3],
        lambda x: x * [1.0, 2.0][int(x[0, 0] > 0)],
    ],
)
def test_reads_of_values_are_refused(function: Any, dynamo: bool) -> None:
    strategy = ait.OneBackendStrategy(("onnxruntime", {"use_dynamo": dynamo}))
    with pytest.raises((ait.TuningError, ait.RecordingError)):
        ait.tune(ait.Module(Net(function), strategy=strategy), torch.rand(3, 4) + 1)


def test_item_that_dynamo_follows_or_refuses_is_never_frozen() -> None:
    model = ait.Module(Net(lambda x: x * x[0].item()), strategy="first_wins")
    ait.tune(model, torch.tensor([1.0, 2.0]), on_failure="eager")
    assert model(torch.tensor([10.0, 1.0])).tolist() == [100.0, 10.0]


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: {64: 2 * x}.get(x.shape[0], x),
        lambda x: x * 2 if x.shape[0] in {64, 65} else x,
        lambda x: x * ([1.0] * 64 + [2.0] * 10)[x.shape[0]],
    ],
)
def test_sizes_as_keys_are_refused(function: Any, dynamo: bool) -> None:
    strategy = ait.OneBackendStrategy(("onnxruntime", {"use_dynamo": dynamo}))
    shapes = {"x": {0: ait.DynamicDim("n", 1, 70)}}
    model = ait.Module(Net(function), strategy=strategy, dynamic_shapes=shapes)
    with pytest.raises(ait.TuningError):
        ait.tune(model, torch.rand(4, 3))
