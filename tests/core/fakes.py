"""Backends for tests: an honest one, liars, and one that can be stored."""

from __future__ import annotations

import copy
import enum
import struct
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aitune_core.backend import ArtifactReader, ArtifactWriter, Backend, BuildRequest, Engine
from aitune_core.config import BackendConfig
from aitune_core.errors import BackendUnavailableError, BuildError, CheckpointError
from aitune_core.specs import GraphSpec


class Fault(enum.Enum):
    """What is wrong with an engine, or with building it."""

    NONE = "none"
    ZEROS = "zeros"
    FLOAT64 = "float64"
    SWAPPED = "swapped"
    STALE = "stale"
    LARGEST = "largest"
    STRIDED = "strided"
    OVERWRITTEN = "overwritten"
    KEPT = "kept"
    INPUT = "input"
    ONE_ELEMENT = "one_element"
    BFLOAT16 = "bfloat16"
    #: Not wrong: sums in another order.
    ORDER = "order"
    WRITES = "writes"
    RAISES = "raises"
    COUNT = "count"
    SHAPE = "shape"
    GRAD = "grad"
    BUILD = "build"
    NO_ENGINE = "no_engine"
    OTHER_GRAPH = "other_graph"


@attrs.frozen(kw_only=True)
class FakeConfig(BackendConfig):
    """Options of the fakes."""

    fault: Fault = attrs.field(default=Fault.NONE, converter=Fault)
    label: str = attrs.field(default="", validator=attrs.validators.instance_of(str))


class OtherOrder(TorchFunctionMode):
    """Sums the products of linear layers one after the other, from the last to the first."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not nn.functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = args
        total = torch.zeros(*x.shape[:-1], weight.shape[0]) + bias
        for column in reversed(range(weight.shape[1])):
            total = total + x[..., column, None] * weight[:, column]
        return total


class FakeEngine(Engine):
    """Runs the flat module, counts its calls, and lies as it was told."""

    def __init__(self, request: BuildRequest, backend_name: str, fault: Fault) -> None:
        super().__init__(request.graph, request.device, backend_name)
        self.module = request.module
        self.work_dir = request.work_dir
        self.fault = fault
        self.releases = 0
        self.runs = 0
        self._lock = threading.Lock()
        self._previous: list[Tensor] | None = None
        #: Memory for results, by the shapes of inputs.
        self._memory: dict[tuple[torch.Size, ...], list[Tensor]] = {}

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.closed:
            self.fail_closed("run")
        with self._lock:
            self.runs += 1
        if self.fault is Fault.RAISES:
            msg = "the engine broke"
            raise RuntimeError(msg)
        with torch.no_grad():
            outputs = self._outputs(inputs)
        return self._handed_out(inputs, self._lie(inputs, outputs))

    def _outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        match self.fault:
            case Fault.BFLOAT16:
                coarse = copy.deepcopy(self.module).bfloat16()
                coarse_inputs = [
                    tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in inputs
                ]
                return [output.float() for output in coarse(*coarse_inputs)]
            case Fault.ORDER:
                with OtherOrder():
                    return list(self.module(*inputs))
        return list(self.module(*inputs))

    def _lie(self, inputs: Sequence[Tensor], outputs: list[Tensor]) -> Sequence[Tensor]:
        match self.fault:
            case Fault.ZEROS:
                return [torch.zeros_like(output) for output in outputs]
            case Fault.FLOAT64:
                return [output.double() for output in outputs]
            case Fault.SWAPPED:
                return outputs[::-1]
            case Fault.STALE:
                stale, self._previous = self._previous or outputs, outputs
                return stale
            case Fault.LARGEST if self._at_maximum(inputs):
                return [output + 1 for output in outputs]
            case Fault.STRIDED if not all(tensor.is_contiguous() for tensor in inputs):
                return [output + 1 for output in outputs]
            case Fault.ONE_ELEMENT:
                outputs[0].reshape(-1)[-1] += 1e-3 * outputs[0].abs().max()
            case Fault.WRITES:
                inputs[0].add_(1)
            case Fault.COUNT:
                return outputs[:-1]
            case Fault.SHAPE:
                return [output[None] for output in outputs]
            case Fault.GRAD:
                return [output.requires_grad_() for output in outputs]
        return outputs

    def _handed_out(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Right values, in memory that is not the caller's."""
        match self.fault:
            case Fault.OVERWRITTEN:
                shapes = tuple(tensor.shape for tensor in inputs)
                memory = self._memory.setdefault(shapes, list(outputs))
                return [mine.copy_(new) for mine, new in zip(memory, outputs, strict=True)]
            case Fault.KEPT:
                # Right as long as nobody writes to what was handed out.
                first = self._memory.setdefault((), [inputs[0].clone(), *outputs])
                return first[1:] if torch.equal(first[0], inputs[0]) else outputs
            case Fault.INPUT:
                return [
                    tensor if tensor.equal(out) else out
                    for tensor, out in zip(inputs, outputs, strict=False)
                ]
        return outputs

    def _at_maximum(self, inputs: Sequence[Tensor]) -> bool:
        sizes = self.graph.dim_sizes(inputs)
        return all(sizes[name] == dim.max for name, dim in self.graph.dims.items())

    def save(self, artifacts: ArtifactWriter) -> None:
        msg = f"{self.backend_name} engines hold Python code and cannot be stored"
        raise CheckpointError(msg)

    def release(self) -> None:
        self.releases += 1


class FakeBackend(Backend):
    """Builds `FakeEngine` objects; keeps them in ``built`` for tests to look at."""

    name: ClassVar[str] = "fake"
    config_class: ClassVar[type[BackendConfig]] = FakeConfig
    config: FakeConfig

    def __init__(self, config: BackendConfig | None = None, **options: Any) -> None:
        super().__init__(FakeConfig(**options) if config is None else config)
        self.built: list[FakeEngine] = []
        self.requests: list[BuildRequest] = []

    def check_available(self, device: torch.device) -> None:
        if device.type != "cpu":
            msg = f"the fake has no {device}"
            raise BackendUnavailableError(msg, backend_name=self.name, missing=str(device))

    def build(self, request: BuildRequest) -> Engine:
        self.requests.append(request)
        if self.config.fault is Fault.BUILD:
            msg = "the fake cannot build"
            raise BuildError(msg, backend_name=self.name, step="export")
        if self.config.fault is Fault.NO_ENGINE:
            return "no engine"  # type: ignore[return-value]
        (request.work_dir / "artifact.txt").write_text("built")
        if self.config.fault is Fault.OTHER_GRAPH:
            request = attrs.evolve(request, graph=attrs.evolve(request.graph, name="other"))
        engine = FakeEngine(request, self.name, self.config.fault)
        self.built.append(engine)
        return engine

    def load(self, artifacts: ArtifactReader, graph: GraphSpec, device: torch.device) -> Engine:
        msg = f"{self.name} engines cannot be loaded"
        raise CheckpointError(msg)


class AffineEngine(Engine):
    """Each output is a weighted sum of the inputs, plus a constant."""

    def __init__(
        self,
        graph: GraphSpec,
        device: torch.device,
        weights: Sequence[Sequence[float]],
        file: Any = None,
    ) -> None:
        super().__init__(graph, device, AffineBackend.name)
        self.weights = weights
        self.file = file
        self.runs = 0
        self._lock = threading.Lock()

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.closed:
            self.fail_closed("run")
        with self._lock:
            self.runs += 1
        with torch.no_grad():
            return [
                sum(
                    (weight * tensor for weight, tensor in zip(row, inputs, strict=False)),
                    start=torch.full_like(inputs[0], row[-1]),
                ).to(spec.dtype)
                for spec, row in zip(self.graph.outputs, self.weights, strict=True)
            ]

    def save(self, artifacts: ArtifactWriter) -> None:
        artifacts.add_file("weights/values.bin", self.file)
        artifacts.data["rows"] = len(self.weights)

    def release(self) -> None:
        self.weights = ()


class AffineBackend(Backend):
    """Builds engines for modules whose outputs are affine in inputs of one shape."""

    name: ClassVar[str] = "affine"
    config_class: ClassVar[type[BackendConfig]] = FakeConfig
    config: FakeConfig

    def check_available(self, device: torch.device) -> None:
        if device.type != "cpu":
            msg = f"the fake has no {device}"
            raise BackendUnavailableError(msg, backend_name=self.name, missing=str(device))

    def build(self, request: BuildRequest) -> Engine:
        zeros = [torch.zeros_like(tensor) for tensor in request.samples[0]]
        constants = self._values(request, zeros)
        columns = []
        for index, tensor in enumerate(zeros):
            unit = [*zeros[:index], torch.ones_like(tensor), *zeros[index + 1 :]]
            columns.append(
                [a - b for a, b in zip(self._values(request, unit), constants, strict=True)]
            )
        weights = [list(row) for row in zip(*columns, constants, strict=True)]
        file = request.work_dir / "values.bin"
        file.write_bytes(b"".join(struct.pack("<d", value) for row in weights for value in row))
        return AffineEngine(request.graph, request.device, weights, file)

    @staticmethod
    def _values(request: BuildRequest, inputs: Sequence[Tensor]) -> list[float]:
        with torch.no_grad():
            return [float(output.reshape(-1)[0]) for output in request.module(*inputs)]

    def load(self, artifacts: ArtifactReader, graph: GraphSpec, device: torch.device) -> Engine:
        file = artifacts.path("weights/values.bin")
        rows, count = artifacts.data["rows"], len(graph.inputs) + 1
        content = file.read_bytes()
        if len(content) != 8 * rows * count:
            msg = f"expected {8 * rows * count} bytes of weights, got {len(content)}"
            raise CheckpointError(msg, expected=8 * rows * count, got=len(content))
        values = struct.unpack(f"<{rows * count}d", content)
        weights = [list(values[start : start + count]) for start in range(0, rows * count, count)]
        return AffineEngine(graph, device, weights, file)
