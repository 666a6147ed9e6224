"""Which shapes get a CUDA graph, and where their tensors lie; no GPU is needed for that."""

from __future__ import annotations

import threading

import pytest
import torch

from aitune_backend_onnxruntime.graphs import (
    MAX_GRAPHS,
    CapturedGraph,
    GraphCache,
    GraphRefusedError,
    Slab,
)


def key(size: int) -> tuple[torch.Size, ...]:
    return (torch.Size([size, 4]),)


def graph() -> CapturedGraph:
    return CapturedGraph(0, [], [], torch.empty(0))


def test_third_call_of_a_shape_is_due() -> None:
    cache = GraphCache(always=False)
    assert [cache.due(key(1)) for _ in range(3)] == [False, False, True]
    assert not cache.due(key(2))


def test_every_call_is_due_where_graphs_are_asked_for() -> None:
    assert GraphCache(always=True).due(key(1))


def test_nothing_is_due_while_other_threads_run() -> None:
    cache = GraphCache(always=False)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not any(cache.due(key(1)) for _ in range(5))
    finally:
        stop.set()
        thread.join()
    assert cache.due(key(1))


def test_graph_used_longest_ago_makes_room_and_returns_late() -> None:
    cache = GraphCache(always=False)
    for size in range(MAX_GRAPHS):
        cache.put(key(size), graph())
    assert cache.get(key(0)) is not None
    cache.put(key(MAX_GRAPHS), graph())
    assert len(cache) == MAX_GRAPHS
    assert cache.get(key(0)) is not None
    assert cache.get(key(1)) is None
    assert [cache.due(key(1)) for _ in range(64)] == [False] * 63 + [True]


def test_refused_shapes_are_not_tried_again_and_several_end_it() -> None:
    cache = GraphCache(always=False)
    assert cache.refuse(key(1), GraphRefusedError("why"))
    assert not any(cache.due(key(1)) for _ in range(5))
    assert [cache.due(key(2)) for _ in range(3)][-1]
    for size in range(3, 6):
        assert not cache.refuse(key(size), GraphRefusedError("why"))
    assert not any(cache.due(key(9)) for _ in range(5))


def test_counts_of_calls_are_bounded() -> None:
    cache = GraphCache(always=False)
    for size in range(10_000):
        cache.due(key(size))
    assert len(cache._calls) <= 4096


def test_tensors_share_memory_that_is_taken_once() -> None:
    slab = Slab(torch.device("cpu"))
    wanted = [((3, 5), torch.float16), ((7,), torch.bool), ((), torch.int64)]
    memory, tensors = slab.tensors(wanted)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == wanted
    for tensor in tensors:
        tensor.fill_(1)
        assert (tensor.data_ptr() - memory.data_ptr()) % 256 == 0
    assert [int(tensor.sum()) for tensor in tensors] == [15, 7, 1]
    again, _ = slab.tensors([((100,), torch.uint8)])
    assert again is memory
    more, (large,) = slab.tensors([((1000,), torch.float64)])
    assert more is not memory
    assert large.nbytes <= more.nbytes
    assert [int(tensor.sum()) for tensor in tensors] == [15, 7, 1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_memory_can_be_written_in_any_mode(mode: type[torch.no_grad]) -> None:
    with mode():
        _, (tensor,) = Slab(torch.device("cpu")).tensors([((4,), torch.float32)])
    tensor.copy_(torch.ones(4))
    assert not tensor.is_inference()
    assert not tensor.requires_grad
