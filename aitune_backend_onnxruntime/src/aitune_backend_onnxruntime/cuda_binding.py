"""Runs on CUDA, in order with PyTorch's work and without waiting for the GPU.

ONNX Runtime runs on a stream of its own and knows nothing of PyTorch's streams. Every session
therefore gets one private stream, and two events per call put it between what the caller queued
before and what the caller queues next.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import torch
from onnxruntime.capi import _pybind_state as ort_c

from aitune_backend_onnxruntime.binding import (
    InputSlot,
    OutputSlot,
    Runner,
    Shape,
    allocated_shape,
    copy_from_host,
    plain,
    quiet_run_options,
    run_error,
)
from aitune_backend_onnxruntime.cuda_driver import CudaDriver
from aitune_backend_onnxruntime.exclusive import DEVICE_WORK
from aitune_backend_onnxruntime.session import ORT_ERRORS
from aitune_backend_onnxruntime.timeline import Timeline, current_stream, new_event
from aitune_core.errors import InputMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aitune_core.specs import GraphSpec

__all__ = ["CudaRunner"]

_NVIDIA: Final = 0x10DE
#: Pinned staging memory piles up in runs that do not end with a synchronisation.
_RUNS_BETWEEN_SYNCS: Final = 1000


class CudaRunner(Runner):
    """Runs a session on its private stream. Calls of several threads queue up in turn.

    Args:
        session: An ``onnxruntime.InferenceSession`` with ``user_compute_stream`` set to
            ``stream``; the runner owns it.
        graph: The graph that it was made for.
        device: CUDA device, with an index.
        stream: The private stream.
    """

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - onnxruntime has no types
        graph: GraphSpec,
        *,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self._device_work = DEVICE_WORK  # still there when modules are taken down
        super().__init__(session, graph)
        self._device = device
        self._index = device.index
        self._private = stream
        self._stream = stream.cuda_stream
        self._lock = threading.Lock()
        self._runs = 0
        memory = ort_c.OrtDevice.default_memory()
        self._gpu = ort_c.OrtDevice(ort_c.OrtDevice.cuda(), memory, _NVIDIA, self._index)
        self._cpu = ort_c.OrtDevice(ort_c.OrtDevice.cpu(), memory, 0, 0)
        self._synced = quiet_run_options()
        self._unsynced = quiet_run_options()
        # Values that a kernel writes to host memory are ready only after a synchronised run.
        if not any(slot.written_on_cpu for slot in self.outputs):
            self._unsynced.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._driver = CudaDriver()
        with torch.cuda.device(device):
            self._timeline = Timeline(self._driver)
            self._before, self._after = new_event(), new_event()

    def __del__(self) -> None:
        """Free the session while no thread captures a graph."""
        with self._device_work:
            self.__dict__.pop("_session", None)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on inputs that fit the graph; the results are the caller's.

        Args:
            inputs: Flat inputs; those on CUDA are read in order with the current stream.

        Returns:
            Outputs on the devices that the graph states, ready for use on the current stream.

        Raises:
            InputMismatchError: An input is on another GPU.
            EngineRunError: ONNX Runtime failed.
        """
        if torch.cuda.current_device() == self._index:
            return self._run_here(inputs)
        with torch.cuda.device(self._index):
            return self._run_here(inputs)

    def _run_here(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        # Copies and allocations belong to the caller's stream; they end before the lock is taken.
        caller = current_stream(self._index)
        bound = [self._prepared(slot, inputs[slot.index]) for slot in self.inputs]
        predicted = self.predicted_shapes(inputs)
        with self._lock:
            try:
                results = self._run_between(caller, bound, predicted)
            except torch.OutOfMemoryError:  # a RuntimeError, but not ONNX Runtime's
                raise
            except ORT_ERRORS as error:
                results = self._run_again(caller, bound, error)
            else:
                if None not in predicted:
                    return self._delivered(results)
        self.learn(inputs, predicted, results)
        return self._delivered(results)

    def _run_again(self, caller: int, bound: list[Tensor], error: Exception) -> list[Tensor]:
        """Run without predicted shapes, which tells a wrong prediction from a real failure."""
        try:
            return self._run_between(caller, bound, [None] * len(self.outputs))
        except ORT_ERRORS as second:
            raise run_error(second) from error

    def _prepared(self, slot: InputSlot, tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            if tensor.get_device() != self._index:
                msg = (
                    f"input {slot.spec.path!r} is on {tensor.device}, this engine runs on "
                    f"{self._device}"
                )
                raise InputMismatchError(
                    msg, path=slot.spec.path, expected=str(self._device), got=str(tensor.device)
                )
        elif not slot.reads_on_cpu:
            return plain(tensor).to(self._device)
        elif tensor.is_pinned():
            # A copy from pinned memory goes on after the call, when the caller may write to it.
            return tensor.clone(memory_format=torch.contiguous_format)
        return plain(tensor)

    def _run_between(
        self, caller: int, bound: list[Tensor], shapes: Sequence[Shape | None]
    ) -> list[Tensor]:
        """Run after what ``caller`` has queued and before what it queues next."""
        results = [
            None if shape is None else self._allocated(slot, shape)
            for slot, shape in zip(self.outputs, shapes, strict=True)
        ]
        # What the caller captures is a run of its own, whenever that is.
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            self._timeline.enter(caller)
        if caller != self._stream:
            self._follow(self._stream, caller, self._before)  # before binding: binding may copy
        try:
            binding = self._bound(bound, results)
            self._session.run_with_iobinding(binding, self._run_options())
            if any(result is None or not result.numel() for result in results):
                return self._collect(caller, binding, results)
        finally:
            # Also after a failure: memory of the inputs may be reused as soon as this returns.
            if caller != self._stream:
                self._follow(caller, self._stream, self._after)
            if not capturing:
                self._timeline.leave(caller)
        return results  # type: ignore[return-value]

    def _follow(self, stream: int, other: int, event: torch.cuda.Event) -> None:
        """Let what is queued next on ``stream`` wait for what is queued on ``other``."""
        self._driver.record(event.cuda_event, other)
        self._driver.wait(stream, event.cuda_event)

    def _bound(self, inputs: list[Tensor], results: Sequence[Tensor | None]) -> Any:  # noqa: ANN401
        binding = ort_c.SessionIOBinding(self._session)
        for slot, tensor in zip(self.inputs, inputs, strict=True):
            device = self._gpu if tensor.is_cuda else self._cpu
            binding.bind_input(slot.name, device, slot.onnx_type, tensor.shape, tensor.data_ptr())
        for output, result in zip(self.outputs, results, strict=True):
            device = self._cpu if output.written_on_cpu else self._gpu
            if result is None or not result.numel():
                binding.bind_output(output.name, device)
            else:
                binding.bind_output(
                    output.name, device, output.onnx_type, result.shape, result.data_ptr()
                )
        return binding

    def _run_options(self) -> Any:  # noqa: ANN401 - onnxruntime has no types
        self._runs += 1
        if self._runs < _RUNS_BETWEEN_SYNCS or torch.cuda.is_current_stream_capturing():
            return self._unsynced
        self._runs = 0
        return self._synced

    def _allocated(self, slot: OutputSlot, shape: Shape) -> Tensor:
        return torch.empty(
            shape, dtype=slot.dtype, device="cpu" if slot.written_on_cpu else self._device
        )

    def _collect(
        self,
        caller: int,
        binding: Any,  # noqa: ANN401
        results: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Copy what ONNX Runtime allocated, on its stream: there its memory is reused in order."""
        collected = []
        for index, (value, slot) in enumerate(
            zip(binding.get_outputs(), self.outputs, strict=True)
        ):
            known = results[index]
            if known is not None and known.numel():
                collected.append(known)
                continue
            shape = allocated_shape(value, known)
            result = self._allocated(slot, shape)
            if result.numel():
                self._copy(caller, value, result)
            collected.append(result)
        return collected

    def _copy(self, caller: int, value: Any, result: Tensor) -> None:  # noqa: ANN401
        if not result.is_cuda:
            copy_from_host(value, result)
            return
        source = torch.as_tensor(_GpuBytes(value.data_ptr(), result.nbytes), device=result.device)
        # The new tensor's memory may still be in use by work that the caller queued before.
        self._follow(self._stream, caller, self._before)
        with torch.cuda.stream(self._private):
            result.view(-1).view(torch.uint8).copy_(source)

    def _delivered(self, results: list[Tensor]) -> list[Tensor]:
        """Move outputs that are stated on another kind of device than they were written on."""
        return [
            result
            if result.device.type == slot.spec.device_type
            else result.to(self._device if slot.spec.device_type == "cuda" else "cpu")
            for slot, result in zip(self.outputs, results, strict=True)
        ]


class _GpuBytes:
    """Bytes at an address of the GPU, which PyTorch can take as a tensor of uint8.

    Source:
        CUDA Array Interface, version 3 (Numba documentation).
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
