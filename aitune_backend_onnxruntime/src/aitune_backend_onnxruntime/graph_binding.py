"""Runs on CUDA that are captured once per tuple of input shapes, and replayed.

A replay is queued on the caller's stream: inputs are copied to where the graph reads, the graph is
launched, and what it wrote is copied out, so that results are the caller's own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from aitune_backend_onnxruntime.binding import run_error
from aitune_backend_onnxruntime.cuda_binding import CudaRunner
from aitune_backend_onnxruntime.cuda_driver import CudaDriverError
from aitune_backend_onnxruntime.errors import EngineRunError
from aitune_backend_onnxruntime.exclusive import DEVICE_WORK
from aitune_backend_onnxruntime.graphs import (
    CapturedGraph,
    GraphCache,
    GraphRefusedError,
    Slab,
    captured,
)
from aitune_backend_onnxruntime.session import ORT_ERRORS
from aitune_backend_onnxruntime.staging import copied, copy_all, key_of
from aitune_backend_onnxruntime.timeline import current_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from aitune_core.specs import GraphSpec

__all__ = ["GraphRunner"]

_log = logging.getLogger(__name__)

#: The first may search algorithms, the second takes the memory that all later ones use.
_WARM_UP_RUNS: Final = 2


class GraphRunner(CudaRunner):
    """Runs a session, and replays runs that it captured.

    Args:
        session: As for `CudaRunner`.
        graph: The graph that it was made for.
        device: CUDA device, with an index.
        stream: The private stream.
        always: Replay every call; otherwise shapes that were captured, or come again and again.
    """

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - onnxruntime has no types
        graph: GraphSpec,
        *,
        device: torch.device,
        stream: torch.cuda.Stream,
        always: bool,
    ) -> None:
        super().__init__(session, graph, device=device, stream=stream)
        self.graphs = GraphCache(always=always)
        #: Whether calls are replayed; off until the plain way was checked.
        self.replays = False
        self._slab = Slab(device)
        self._places = [slot.index for slot in self.inputs]
        self._all_on_gpu = all(slot.spec.device_type == "cuda" for slot in self.outputs)

    def capture(self, inputs: Sequence[Tensor]) -> None:
        """Capture the graph for the shapes of inputs.

        Raises:
            GraphRefusedError: This run cannot be replayed.
            EngineRunError: ONNX Runtime failed.
        """
        with torch.cuda.device(self._index):
            results = super()._run_here(inputs)
            with self._lock:
                self._capture(inputs, results)

    def drop_graphs(self) -> None:
        """Run every call plainly from now on, and free the graphs."""
        with self._lock:
            self.replays = False
            self.graphs = GraphCache(always=self.graphs.always)
            self._slab = Slab(self._device)

    def _run_here(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if not self.replays or torch.cuda.is_current_stream_capturing():
            return super()._run_here(inputs)
        key = key_of(inputs)
        with self._lock:
            graph = self.graphs.get(key)
            if graph is not None:
                return self._replayed(graph, inputs)
        results = super()._run_here(inputs)
        if all(tensor.numel() for tensor in (*inputs, *results)):
            with self._lock:
                if self.graphs.get(key) is None and self.graphs.due(key):
                    self._capture_now(inputs, results)
        return results

    def _capture_now(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Capture, unless a session is being created: no call waits for that."""
        if DEVICE_WORK.acquire(blocking=False):
            try:
                self._try_capture(inputs, results)
            finally:
                DEVICE_WORK.release()

    def _try_capture(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        try:
            self._capture(inputs, results)
        except GraphRefusedError as error:
            first = self.graphs.refuse(key_of(inputs), error)
            if self.graphs.always:
                msg = f"cuda_graphs=True, but {error}; use cuda_graphs='auto' to run without"
                raise EngineRunError(msg) from error
            if first:
                _log.warning("calls of some shapes run without a CUDA graph: %s", error)

    def _capture(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Capture the run of inputs whose results are known, and compare a replay with them."""
        if any(slot.reads_on_cpu for slot in self.inputs):
            msg = "the session reads an input on the CPU"
            raise GraphRefusedError(msg)
        if any(slot.written_on_cpu for slot in self.outputs):
            msg = "the session writes an output on the CPU"
            raise GraphRefusedError(msg)
        if None in self.predicted_shapes(inputs):
            msg = "the shape of an output depends on values"
            raise GraphRefusedError(msg)
        read = [inputs[place] for place in self._places]
        if not all(tensor.numel() for tensor in (*read, *results)):
            msg = "a tensor is empty"
            raise GraphRefusedError(msg)
        try:
            memory, tensors = self._slab.tensors(
                [
                    *((tuple(tensor.shape), tensor.dtype) for tensor in read),
                    *(
                        (tuple(got.shape), slot.dtype)
                        for got, slot in zip(results, self.outputs, strict=True)
                    ),
                ]
            )
        except torch.OutOfMemoryError as error:
            msg = "there is no memory left for its inputs and outputs"
            raise GraphRefusedError(msg) from error
        count = len(read)
        binding = self._bound(tensors[:count], tensors[count:])

        def run() -> None:
            self._session.run_with_iobinding(binding, self._unsynced)

        self._warm_up(tensors[:count], read, run)
        graph = CapturedGraph(
            captured(self._driver, self._stream, run), tensors[:count], tensors[count:], memory
        )
        graph.free_with(self._driver)
        _check_replay(self._replayed(graph, inputs), results)
        self.graphs.put(key_of(inputs), graph)

    def _warm_up(
        self, targets: list[Tensor], inputs: list[Tensor], run: Callable[[], object]
    ) -> None:
        """Run on real values until all is in place, and wait for it."""
        caller = current_stream(self._index)
        self._timeline.enter(caller)
        try:
            copy_all(targets, inputs)
            self._follow(self._stream, caller, self._before)
            for _ in range(_WARM_UP_RUNS):
                run()
        except ORT_ERRORS as error:
            msg = f"a run failed: {run_error(error)}"
            raise GraphRefusedError(msg) from error
        finally:
            self._follow(caller, self._stream, self._after)
            self._timeline.leave(caller)
        self._private.synchronize()

    def _replayed(self, graph: CapturedGraph, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Replay a graph on the caller's stream; its memory is anybody's again afterwards."""
        read = [inputs[place] for place in self._places]
        index = self._index
        for tensor in read:
            if tensor.get_device() != index:
                read = [self._prepared(slot, inputs[slot.index]) for slot in self.inputs]
                break
        stream = current_stream(index)
        if stream not in graph.streams:
            # PyTorch must not give the memory to others while this stream uses it.
            graph.memory.record_stream(torch.cuda.current_stream(index))
            graph.streams.add(stream)
        try:
            self._timeline.enter(stream)
            try:
                copy_all(graph.inputs, read)
                self._driver.launch(graph.executable, stream)
                results = copied(graph.outputs)
            finally:
                self._timeline.leave(stream)
        except CudaDriverError as error:
            msg = f"the replay of a CUDA graph failed: {error}"
            raise EngineRunError(msg) from error
        return results if self._all_on_gpu else self._delivered(results)


def _check_replay(replayed: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for got, wanted in zip(replayed, expected, strict=True):
        try:
            torch.testing.assert_close(got, wanted, equal_nan=True)
        except AssertionError as error:
            msg = f"a replay differs from a run: {' '.join(str(error).split())}"
            raise GraphRefusedError(msg) from error
