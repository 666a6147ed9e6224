"""Runs of a session on PyTorch's memory: nothing is copied that need not be.

One `Runner` belongs to one session. What can be known before a call is worked out once; a call
makes a fresh binding, binds addresses, runs, and returns tensors that nobody else writes to.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import torch
from onnxruntime.capi import _pybind_state as ort_c

from aitune_backend_onnxruntime.dtypes import onnx_type
from aitune_backend_onnxruntime.errors import EngineRunError
from aitune_backend_onnxruntime.session import ORT_ERRORS
from aitune_backend_onnxruntime.staging import Key, Stage, StageCache, copied, copy_all, key_of
from aitune_core.specs import DynamicDim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aitune_core.specs import GraphSpec, TensorSpec

__all__ = [
    "CpuRunner",
    "InputSlot",
    "OutputSlot",
    "Runner",
    "Shape",
    "allocated_shape",
    "copy_from_host",
    "plain",
    "quiet_run_options",
    "run_error",
]

Shape: TypeAlias = tuple[int, ...]

#: Said each time, since the program may have set another default device.
_CPU: Final = torch.device("cpu")
#: Input shapes for which output shapes are remembered.
_REMEMBERED_SHAPES: Final = 256
_FATAL_SEVERITY: Final = 4
#: Bytes of a call's tensors up to which copies cost less than binding.
_STAGED_BYTES: Final = 2**15
#: Name of plain GPU memory in ``OrtMemoryInfo``; all others, "CudaPinned" too, are on the host.
_GPU_MEMORY: Final = "Cuda"


@attrs.frozen
class InputSlot:
    """An input of the session.

    Attributes:
        index: Its place among the graph's inputs.
        name: Its name in the session.
        onnx_type: ``TensorProto.DataType``.
        spec: Its spec in the graph.
        reads_on_cpu: Whether the session reads it on the CPU, whatever device it runs on.
    """

    index: int
    name: str
    onnx_type: int
    spec: TensorSpec
    reads_on_cpu: bool


@attrs.frozen
class OutputSlot:
    """An output of the session.

    Attributes:
        name: Its name in the session.
        onnx_type: ``TensorProto.DataType``.
        dtype: Torch's element type.
        spec: Its spec in the graph.
        sizes: Where each size comes from: a number, or input and axis. None where an axis
            follows no input.
        written_on_cpu: Whether the session writes it on the CPU, whatever device it runs on.
    """

    name: str
    onnx_type: int
    dtype: torch.dtype
    spec: TensorSpec
    sizes: tuple[int | tuple[int, int], ...] | None
    written_on_cpu: bool


def quiet_run_options() -> Any:  # noqa: ANN401 - onnxruntime has no types
    """Return run options that log nothing: a failed run raises, and that says it all."""
    options = ort_c.RunOptions()
    options.log_severity_level = _FATAL_SEVERITY
    return options


class Runner(ABC):
    """Runs one session. Thread-safe.

    Args:
        session: An ``onnxruntime.InferenceSession``; the runner owns it.
        graph: The graph that it was made for.
    """

    def __init__(self, session: Any, graph: GraphSpec) -> None:  # noqa: ANN401
        self._session = session._sess  # noqa: SLF001 - the Python wrapper costs 50 us per call
        self.inputs = _input_slots(session, graph)
        self.outputs = _output_slots(session, graph)
        self._input_count = len(graph.inputs)
        # Shapes that follow no input but were the same whenever the inputs' shapes were.
        self._learned: dict[tuple[Shape, ...], tuple[Shape, ...]] = {}
        self._must_learn = any(slot.sizes is None for slot in self.outputs)
        # Outputs whose shape was seen to depend on values; never allocated before a run.
        self._unpredictable: frozenset[int] = frozenset()

    @abstractmethod
    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on inputs that fit the graph; the results are the caller's.

        Raises:
            EngineRunError: ONNX Runtime failed.
        """

    def predicted_shapes(self, inputs: Sequence[Tensor]) -> list[Shape | None]:
        """Return the shape of each output, or None where only the run can tell."""
        shapes: list[Shape | None] = [
            None
            if slot.sizes is None
            else tuple(
                [
                    size if isinstance(size, int) else inputs[size[0]].shape[size[1]]
                    for size in slot.sizes
                ]
            )
            for slot in self.outputs
        ]
        if self._must_learn:
            learned = self._learned.get(tuple([tuple(tensor.shape) for tensor in inputs]))
            if learned is not None:
                shapes = [
                    known if known is not None else seen
                    for known, seen in zip(shapes, learned, strict=True)
                ]
        for index in self._unpredictable:
            shapes[index] = None
        return shapes

    def learn(
        self, inputs: Sequence[Tensor], predicted: Sequence[Shape | None], results: Sequence[Tensor]
    ) -> None:
        """Note the shapes of a run, and the outputs for which the prediction was wrong."""
        shapes = tuple(tuple(result.shape) for result in results)
        wrong = {
            index
            for index, (expected, got) in enumerate(zip(predicted, shapes, strict=True))
            if expected is not None and expected != got
        }
        if wrong:
            self._unpredictable |= wrong
        if self._must_learn:
            if len(self._learned) >= _REMEMBERED_SHAPES:
                self._learned.clear()
            self._learned[tuple(tuple(tensor.shape) for tensor in inputs)] = shapes


class CpuRunner(Runner):
    """Runs a session on the CPU. Calls do not wait for each other."""

    def __init__(self, session: Any, graph: GraphSpec) -> None:  # noqa: ANN401
        super().__init__(session, graph)
        self._device = ort_c.OrtDevice(
            ort_c.OrtDevice.cpu(), ort_c.OrtDevice.default_memory(), 0, 0
        )
        self._options = quiet_run_options()
        self._places = [slot.index for slot in self.inputs]
        self._stages = StageCache()

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on inputs that fit the graph; the results are the caller's.

        Raises:
            EngineRunError: ONNX Runtime failed.
        """
        key = key_of(inputs)
        stage = self._stages.take(key)
        if stage is not None:
            return self._run_staged(key, stage, inputs)
        predicted = self.predicted_shapes(inputs)
        # The list keeps contiguous copies alive until the run is over.
        bound = [plain(inputs[slot.index]) for slot in self.inputs]
        try:
            results = self._run(bound, predicted)
        except ORT_ERRORS as error:
            results = self._run_again(bound, error)
        else:
            if None not in predicted:
                self._prepare(key, bound, results)
                return results
        self.learn(inputs, predicted, results)
        return results

    def _run_staged(self, key: Key, stage: Stage, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on tensors that are bound already, which saves more than copies of them cost."""
        copy_all(stage.inputs, [inputs[place] for place in self._places])
        try:
            self._session.run_with_iobinding(stage.binding, self._options)
        except ORT_ERRORS as error:
            raise run_error(error) from error
        results = copied(stage.outputs)
        self._stages.give(key, stage)
        return results

    def _prepare(self, key: Key, bound: list[Tensor], results: list[Tensor]) -> None:
        """Bind tensors for calls of this shape, if all are small and none is empty."""
        sizes = [tensor.nbytes for tensor in (*bound, *results)]
        # Shapes that were learned may depend on values.
        if self._must_learn or 0 in sizes or sum(sizes) > _STAGED_BYTES:
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            inputs, outputs = (
                [torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU) for tensor in tensors]
                for tensors in (bound, results)
            )
        self._stages.give(key, Stage(inputs, outputs, self._bound(inputs, outputs)))

    def _run_again(self, bound: list[Tensor], error: Exception) -> list[Tensor]:
        """Run without predicted shapes, which tells a wrong prediction from a real failure."""
        try:
            return self._run(bound, [None] * len(self.outputs))
        except ORT_ERRORS as second:
            raise run_error(second) from error

    def _run(self, bound: list[Tensor], shapes: Sequence[Shape | None]) -> list[Tensor]:
        results = [
            None if shape is None else torch.empty(shape, dtype=output.dtype, device=_CPU)
            for output, shape in zip(self.outputs, shapes, strict=True)
        ]
        binding = self._bound(bound, results)
        self._session.run_with_iobinding(binding, self._options)
        if all(result is not None and result.numel() for result in results):
            return results  # type: ignore[return-value]
        return self._collect(binding, results)

    def _bound(self, inputs: Sequence[Tensor], results: Sequence[Tensor | None]) -> Any:  # noqa: ANN401
        binding = ort_c.SessionIOBinding(self._session)
        device = self._device
        for slot, tensor in zip(self.inputs, inputs, strict=True):
            binding.bind_input(slot.name, device, slot.onnx_type, tensor.shape, tensor.data_ptr())
        for output, result in zip(self.outputs, results, strict=True):
            if result is None or not result.numel():
                binding.bind_output(output.name, device)
            else:
                binding.bind_output(
                    output.name, device, output.onnx_type, result.shape, result.data_ptr()
                )
        return binding

    def _collect(self, binding: Any, results: list[Tensor | None]) -> list[Tensor]:  # noqa: ANN401
        """Copy what ONNX Runtime allocated."""
        all_results = []
        for index, (value, slot) in enumerate(
            zip(binding.get_outputs(), self.outputs, strict=True)
        ):
            result = results[index]
            if result is None or not result.numel():
                result = torch.empty(allocated_shape(value, result), dtype=slot.dtype, device=_CPU)
                copy_from_host(value, result)
            all_results.append(result)
        return all_results


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a copy if its values do not lie in memory in plain order."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def run_error(error: Exception) -> EngineRunError:
    """Return the public error for one that ONNX Runtime raised in a run."""
    return EngineRunError(f"ONNX Runtime failed in a run: {' '.join(str(error).split())}")


def copy_from_host(value: Any, result: Tensor) -> None:  # noqa: ANN401
    """Copy an ``OrtValue`` in host memory into a tensor of its size and type, on the CPU.

    Byte by byte, since not all types pass through DLPack or NumPy.
    """
    ctypes.memmove(result.data_ptr(), value.data_ptr(), result.nbytes)


def allocated_shape(value: Any, result: Tensor | None) -> Shape:  # noqa: ANN401
    """Return the shape of an ``OrtValue``.

    Raises:
        ValueError: An empty tensor was expected, and it is not what came.
    """
    shape = tuple(value.shape())
    if result is not None and tuple(result.shape) != shape:
        msg = f"output has shape {shape}, expected {tuple(result.shape)}"
        raise ValueError(msg)
    return shape


def _input_slots(session: Any, graph: GraphSpec) -> tuple[InputSlot, ...]:  # noqa: ANN401
    places = {spec.name: index for index, spec in enumerate(graph.inputs)}
    slots = []
    for info, memory in zip(session.get_inputs(), session.get_input_memory_infos(), strict=True):
        index = places[info.name]
        spec = graph.inputs[index]
        number = onnx_type(spec.dtype, spec.path)
        slots.append(InputSlot(index, info.name, number, spec, memory.name != _GPU_MEMORY))
    return tuple(slots)


def _output_slots(session: Any, graph: GraphSpec) -> tuple[OutputSlot, ...]:  # noqa: ANN401
    sources = {
        dim.name: (index, axis)
        for index, spec in enumerate(graph.inputs)
        for axis, dim in spec.dynamic_axes.items()
    }
    slots = []
    for info, memory, spec in zip(
        session.get_outputs(), session.get_output_memory_infos(), graph.outputs, strict=True
    ):
        sizes = [
            sources.get(size.name) if isinstance(size, DynamicDim) else size for size in spec.shape
        ]
        slots.append(
            OutputSlot(
                name=info.name,
                onnx_type=onnx_type(spec.dtype, spec.path),
                dtype=spec.dtype,
                spec=spec,
                sizes=None if None in sizes else tuple(size for size in sizes if size is not None),
                written_on_cpu=memory.name != _GPU_MEMORY,
            )
        )
    return tuple(slots)
