from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import recorded, with_dims

from aitune_core import BatchDim, DynamicDim
from aitune_core._synthesis import (
    corner_sizes,
    distinct_sizes,
    reordered_rows,
    resize_inputs,
    strided_copies,
)

LENGTH = DynamicDim("length", 2, 6)


SHAPES = {"ids": [BatchDim(1, 8), LENGTH], "mask": [BatchDim(1, 8), LENGTH]}
(GRAPH,) = recorded(
    lambda ids, mask, table: ids + mask + table[0],
    (torch.arange(6).reshape(2, 3), torch.ones(2, 3), torch.ones(4)),
    dynamic_shapes=SHAPES,
)


def test_resized_inputs_have_the_wanted_sizes_and_recorded_values() -> None:
    ids, mask, table = resize_inputs(GRAPH.spec, GRAPH.samples, {"batch": 3, "length": 5})
    assert ids.tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4], [0, 1, 2, 0, 1]]
    assert mask.shape == (3, 5)
    assert table.shape == (4,)


def test_dims_that_are_left_out_keep_the_recorded_size() -> None:
    ids, _, _ = resize_inputs(GRAPH.spec, GRAPH.samples, {"batch": 1})
    assert ids.tolist() == [[0, 1, 2]]


def test_resized_inputs_share_no_memory_with_samples() -> None:
    ids, _, table = resize_inputs(GRAPH.spec, GRAPH.samples, {})
    ids.fill_(-1)
    table.fill_(-1)
    assert GRAPH.samples[0][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert GRAPH.samples[0][2].tolist() == [1, 1, 1, 1]


def test_samples_with_rows_are_preferred_to_empty_ones() -> None:
    (graph,) = recorded(lambda x: x * 1, (torch.ones(0, 2),), (torch.full((3, 2), 7.0),))
    (x,) = resize_inputs(graph.spec, graph.samples, {"batch": 2})
    assert x.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    (x,) = resize_inputs(graph.spec, graph.samples[:1], {"batch": 2})
    assert x.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_corners_are_both_ends_each_dim_alone_and_the_interior() -> None:
    corners = corner_sizes(with_dims(BatchDim(1, 8), LENGTH))
    assert {"batch": 1, "length": 2} in corners.values()
    assert {"batch": 8, "length": 6} in corners.values()
    assert {"batch": 1, "length": 6} in corners.values()
    assert {"batch": 8, "length": 2} in corners.values()
    interior = corners["interior"]
    assert 1 < interior["batch"] < 8
    assert 2 < interior["length"] < 6
    assert corner_sizes(with_dims()) == {}


ranges = st.tuples(st.integers(0, 5000), st.integers(0, 5000)).map(sorted)


@given(st.lists(ranges, min_size=1, max_size=4))
def test_distinct_sizes_lie_inside_and_differ_where_they_can(pairs: list[list[int]]) -> None:
    graph = with_dims(
        *(DynamicDim(f"d{index}", low, high) for index, (low, high) in enumerate(pairs))
    )
    dims = graph.dims
    sizes = distinct_sizes(graph)
    for name, dim in dims.items():
        assert dim.min <= sizes[name] <= dim.max
    if all(dim.max - dim.min >= len(dims) for dim in dims.values()):
        assert len(set(sizes.values())) == len(dims)


def test_distinct_sizes_of_huge_ranges_are_found_at_once() -> None:
    graph = with_dims(*(DynamicDim(name, 0, 10_000_000) for name in ("a", "b")))
    start = time.process_time()
    sizes = distinct_sizes(graph)
    assert time.process_time() - start < 0.1
    assert sizes["a"] != sizes["b"]


PAST, NEW = DynamicDim("past", 0, 30), DynamicDim("new", 1, 5)
MASK = DynamicDim("mask", 1, 35)


def test_corners_keep_to_the_conditions_of_the_graph() -> None:
    graph = with_dims(PAST, NEW, MASK, conditions=("mask == past + new", "past % 3 == 0"))
    corners = corner_sizes(graph)
    assert len(corners) > 4
    for sizes in corners.values():
        assert sizes["mask"] == sizes["past"] + sizes["new"]
        assert sizes["past"] % 3 == 0


def test_sizes_that_follow_but_leave_their_range_are_no_corners() -> None:
    graph = with_dims(PAST, NEW, DynamicDim("mask", 1, 8), conditions=("mask == past + new",))
    assert {sizes["mask"] for sizes in corner_sizes(graph).values()} <= set(range(1, 9))
    assert graph.completed_sizes({"past": 9, "new": 1, "mask": 1}) is None


def test_strided_copies_are_equal_and_not_contiguous() -> None:
    inputs = (torch.randn(2, 3), torch.arange(3), torch.tensor(1.0), torch.empty(0, 2))
    copies = strided_copies(inputs)
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor.dtype is copy.dtype
        assert tensor.data_ptr() != copy.data_ptr() or tensor.numel() == 0
    assert not copies[0].is_contiguous()
    assert not copies[1].is_contiguous()


def test_rows_are_moved_alike_along_the_batch_and_stay_valid() -> None:
    ids, mask, table = reordered_rows(GRAPH.spec, GRAPH.samples[0]) or ()
    assert ids.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert torch.equal(table, GRAPH.samples[0][2])


def test_rows_of_static_sizes_are_moved_where_all_inputs_have_as_many() -> None:
    x, y = torch.tensor([1, 2, 3]), torch.tensor([[4.0], [5.0], [6.0]])
    scale = torch.tensor(2.0)
    (graph,) = recorded(lambda x, y, scale: x * y * scale, (x, y, scale))
    moved = reordered_rows(graph.spec, graph.samples[0]) or ()
    assert [tensor.tolist() for tensor in moved] == [[3, 1, 2], [[6.0], [4.0], [5.0]], 2.0]
    (graph,) = recorded(lambda x, y: x[:2] * y[:2, 0], (x, y[:2]))
    assert reordered_rows(graph.spec, graph.samples[0]) is None


@pytest.mark.parametrize(
    "x", [torch.ones(1, 3), torch.ones(4, 3), torch.ones(0, 3), torch.ones(())]
)
def test_rows_that_cannot_be_told_apart_are_no_other_values(x: torch.Tensor) -> None:
    (graph,) = recorded(lambda x: x * 2, (x,))
    assert reordered_rows(graph.spec, graph.samples[0]) is None
