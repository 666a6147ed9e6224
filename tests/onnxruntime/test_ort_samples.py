"""Inputs to export with: sizes apart from each other, and none that exporters freeze."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aitune_backend_onnxruntime.samples import export_inputs, export_sizes, varying_axes
from aitune_core.specs import DynamicDim

MakeCase = Callable[..., Any]


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, y + 1


class OnlyEven(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] // 2, -1, 2 * x.shape[1])


def test_equal_sizes_are_told_apart(case: MakeCase) -> None:
    made = case(
        Two(),
        torch.zeros(4, 4),
        torch.zeros(4, 7),
        axes=[
            {0: DynamicDim("a", 1, 9, 4), 1: DynamicDim("b", 1, 9, 4)},
            {0: DynamicDim("c", 1, 9)},
        ],
        out_axes=[{}, {}],
    )
    graph = made.request.graph
    sizes = export_sizes(graph, [{"a": 4, "b": 4, "c": 4}])
    assert sizes["a"] == 4
    assert len({*sizes.values(), 7}) == 4
    assert min(sizes.values()) >= 2
    assert [tuple(x.shape) for x in export_inputs(made.request)] == [
        (sizes["a"], sizes["b"]),
        (sizes["c"], 7),
    ]


def test_size_one_is_avoided_where_the_range_allows(case: MakeCase) -> None:
    made = case(nn.ReLU(), torch.zeros(1, 3), axes=[{0: DynamicDim("a", 1, 9, 1)}], out_axes=[{}])
    assert export_sizes(made.request.graph, [{"a": 1}]) == {"a": 2}
    narrow = case(nn.ReLU(), torch.zeros(1, 3), axes=[{0: DynamicDim("a", 0, 1)}], out_axes=[{}])
    assert export_sizes(narrow.request.graph, [{"a": 1}]) == {"a": 1}


def test_recorded_sizes_are_preferred(case: MakeCase) -> None:
    dim = DynamicDim("a", 1, 1000)
    made = case(nn.ReLU(), torch.zeros(128, 3), axes=[{0: dim}], out_axes=[{0: dim}])
    assert export_sizes(made.request.graph, [{"a": 1}, {"a": 128}]) == {"a": 128}
    assert export_inputs(made.request) is made.request.samples[0]


def test_range_with_no_free_size_left_takes_what_there_is(case: MakeCase) -> None:
    axes = [{0: DynamicDim("a", 3, 3), 1: DynamicDim("b", 3, 3)}]
    made = case(nn.ReLU(), torch.zeros(3, 3), axes=axes, out_axes=[{}])
    assert export_sizes(made.request.graph, []) == {"a": 3, "b": 3}
    assert varying_axes(made.request.graph.inputs[0]) == {}


def test_recorded_call_is_used_where_the_module_refuses_the_chosen_sizes(case: MakeCase) -> None:
    dim = DynamicDim("a", 1, 3, 1)  # 2 is the static size, so 3 would be chosen
    made = case(nn.Flatten(), torch.zeros(1, 2), axes=[{0: dim}], out_axes=[{0: dim}])
    assert [x.shape[0] for x in export_inputs(made.request)] == [3]
    even = DynamicDim("a", 2, 9, 2)
    made = case(OnlyEven(), torch.zeros(2, 2), axes=[{0: even}], out_axes=[{}])
    assert export_inputs(made.request) is made.request.samples[0]
