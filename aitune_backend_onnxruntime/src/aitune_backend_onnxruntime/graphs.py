"""CUDA graphs of a session: one per tuple of input shapes, a bounded number of them."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import OrderedDict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import attrs
import torch

from aitune_backend_onnxruntime.cuda_driver import CaptureMode, CudaDriver, CudaDriverError
from aitune_backend_onnxruntime.exclusive import DEVICE_WORK
from aitune_backend_onnxruntime.idle_threads import only_thread
from aitune_backend_onnxruntime.session import ORT_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from aitune_backend_onnxruntime.staging import Key

__all__ = ["CapturedGraph", "GraphCache", "GraphRefusedError", "Slab", "captured"]

#: Graphs kept per session; the one that was replayed longest ago makes room.
MAX_GRAPHS: Final = 64
#: Calls with the same shapes after which a graph is captured.
_CALLS_BEFORE_CAPTURE: Final = 3
#: The same for shapes whose graph had to make room for others.
_CALLS_BEFORE_RETURN: Final = 64
#: Shapes for which calls are counted.
_COUNTED_SHAPES: Final = 4096
#: After so many shapes without a graph, no more are tried.
_MAX_REFUSALS: Final = 4
#: Captures that others may break, such as a thread that waits for the device, before giving up.
_TRIES: Final = 3
_ALIGNMENT: Final = 256
_CAPTURE_ERRORS: Final[tuple[type[Exception], ...]] = (CudaDriverError, *ORT_ERRORS)


class GraphRefusedError(Exception):
    """A run that cannot be replayed as a graph, or must not; says why."""


class Slab:
    """Memory for the inputs and outputs of all graphs of one session.

    Runs of a session never overlap, so that its graphs can share it. Where more is needed, new
    memory is taken; graphs that were captured on the old keep that.

    Args:
        device: CUDA device, with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None

    def tensors(
        self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the memory and contiguous tensors in it, one per shape and element type.

        Raises:
            torch.OutOfMemoryError: There is no memory left.
        """
        places, size = [], 0
        for shape, dtype in wanted:
            start = size
            size += torch.Size(shape).numel() * dtype.itemsize
            places.append((start, size))
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
        # Whatever mode the caller is in, later calls of others write to these tensors.
        with torch.inference_mode(mode=False), torch.no_grad():
            memory = self._memory
            if memory is None or memory.numel() < size:
                memory = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._memory = memory
            return memory, [
                memory[start:end].view(dtype).view(shape)
                for (start, end), (shape, dtype) in zip(places, wanted, strict=True)
            ]


@attrs.define(eq=False, slots=False)
class CapturedGraph:
    """An executable graph with the memory that it reads and writes.

    Attributes:
        executable: Handle of the driver; freed with this object.
        inputs: Read by a replay, in the order of the session's inputs.
        outputs: Written by a replay, in the order of the session's outputs.
        memory: Where inputs and outputs lie.
        streams: Handles of the streams on which it was used.
    """

    executable: int
    inputs: list[Tensor]
    outputs: list[Tensor]
    memory: Tensor
    streams: set[int] = attrs.Factory(set)

    def free_with(self, driver: CudaDriver) -> None:
        """Free the executable when this object is no longer used."""
        weakref.finalize(self, driver.destroy_executable, self.executable).atexit = False


class GraphCache:
    """The graphs of one session, and which shapes are worth one. Its caller holds a lock.

    Args:
        always: Every call is to be replayed; otherwise shapes that come again and again.
    """

    def __init__(self, *, always: bool) -> None:
        self.always = always
        #: Why there are no graphs for some shapes.
        self.refusals: dict[Key, GraphRefusedError] = {}
        self._graphs: OrderedDict[Key, CapturedGraph] = OrderedDict()
        self._calls: dict[Key, int] = {}

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    @property
    def shapes(self) -> list[Key]:
        """Input shapes that have a graph."""
        return list(self._graphs)

    def get(self, key: Key) -> CapturedGraph | None:
        """Return the graph for some shapes, as the one used last."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def put(self, key: Key, graph: CapturedGraph) -> None:
        """Keep a graph; the one used longest ago makes room if there are too many."""
        self._graphs[key] = graph
        self._calls.pop(key, None)
        if len(self._graphs) > MAX_GRAPHS:
            crowded_out, _ = self._graphs.popitem(last=False)
            self._calls[crowded_out] = _CALLS_BEFORE_CAPTURE - _CALLS_BEFORE_RETURN

    def refuse(self, key: Key, error: GraphRefusedError) -> bool:
        """Note that shapes get no graph; returns whether it is the first such note."""
        self.refusals[key] = error
        return len(self.refusals) == 1

    def due(self, key: Key) -> bool:
        """Count a call that was not replayed; returns whether its graph is to be captured now."""
        if key in self.refusals:
            return False
        if self.always:
            return True
        if len(self.refusals) >= _MAX_REFUSALS:
            return False
        if len(self._calls) >= _COUNTED_SHAPES:
            self._calls.clear()
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        # While a capture goes on, waiting for the device fails in every other thread. One that is
        # alone disturbs nobody.
        return calls >= _CALLS_BEFORE_CAPTURE and only_thread()


def captured(driver: CudaDriver, stream: int, run: Callable[[], object]) -> int:
    """Return an executable graph of what ``run`` queues on a stream.

    Queued twice: once with everything allowed, to look at the work of the host in it, and, where
    there is none, once more with nothing allowed but queueing. So what a replay does depends on
    the values in its memory alone. (The other way round, ONNX Runtime ends the process when it
    cannot free memory of the host.)

    Args:
        driver: The driver.
        stream: Handle of the stream.
        run: Queues the work; was run before, so that all memory is there.

    Raises:
        GraphRefusedError: The work cannot be captured or could not be replayed.
    """
    for attempt in itertools.count(1):
        try:
            with DEVICE_WORK, _no_garbage_collection():
                return _captured_twice(driver, stream, run)
        except _CAPTURE_ERRORS as error:
            _forget_errors()
            if attempt >= _TRIES:
                msg = f"the run cannot be captured: {' '.join(str(error).split())}"
                raise GraphRefusedError(msg) from error
    raise AssertionError  # unreachable


def _captured_twice(driver: CudaDriver, stream: int, run: Callable[[], object]) -> int:
    graph = _captured(driver, stream, run, CaptureMode.RELAXED)
    try:
        unrepeatable = driver.unrepeatable_node(graph)
    finally:
        driver.destroy_graph(graph)
    if unrepeatable is not None:
        msg = f"the run holds {unrepeatable}"
        raise GraphRefusedError(msg)
    graph = _captured(driver, stream, run, CaptureMode.STRICT)
    try:
        return driver.instantiate(graph)
    finally:
        driver.destroy_graph(graph)


def _captured(driver: CudaDriver, stream: int, run: Callable[[], object], mode: CaptureMode) -> int:
    driver.begin_capture(stream, mode)
    try:
        run()
    except BaseException:
        _abandon(driver, stream)
        raise
    return driver.end_capture(stream)


def _abandon(driver: CudaDriver, stream: int) -> None:
    """End a capture that failed, so that the stream can be used again."""
    try:
        graph = driver.end_capture(stream)
    except CudaDriverError:
        return  # the failure ended it
    if graph:
        driver.destroy_graph(graph)


def _forget_errors() -> None:
    """Take note of an error that CUDA keeps for this thread, so that nobody else gets it."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # PyTorch looks for errors after each launch


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep objects that free GPU memory from being freed by this thread in a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
