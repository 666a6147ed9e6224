"""Build requests made by hand, for modules that take and return plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
from aitune_backend_onnxruntime.config import ONNXRuntimeBackendConfig
from aitune_core.backend import (
    ArtifactReader,
    ArtifactWriter,
    Attempt,
    BuildRequest,
    Engine,
)
from aitune_core.conditions import SizeCondition
from aitune_core.errors import ValidationError
from aitune_core.specs import DynamicDim, GraphSpec, TensorSpec

Axes = Mapping[int, DynamicDim]


class Flat(nn.Module):
    """Takes flat tensors and returns a tuple, as the core's wrapper does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = False

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        result = self.module(*(tensor.clone() for tensor in inputs))
        return tuple(result) if isinstance(result, tuple | list) else (result,)


@attrs.define
class Case:
    """A module with its request, and the attempts that the backend noted."""

    request: BuildRequest
    attempts: list[Attempt]

    @property
    def steps(self) -> list[tuple[str, bool]]:
        """The attempts, without details."""
        return [(attempt.step, attempt.succeeded) for attempt in self.attempts]

    def eager(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the module itself."""
        with torch.no_grad():
            return tuple(self.request.module(*inputs))

    def build(self, **options: Any) -> Engine:
        """Build an engine with the given options; by default in this process alone."""
        options.setdefault("isolate", False)
        return ONNXRuntimeBackend(ONNXRuntimeBackendConfig(**options)).build(self.request)


def specs(prefix: str, tensors: Sequence[Tensor], axes: Sequence[Axes]) -> tuple[TensorSpec, ...]:
    """Describe tensors; ``axes`` gives the dims of each."""
    described = []
    for index, (tensor, dims) in enumerate(zip(tensors, axes, strict=True)):
        shape: Any = [dims.get(axis, size) for axis, size in enumerate(tensor.shape)]
        described.append(
            TensorSpec(
                name=f"{prefix}{index}",
                path=f"{prefix}[{index}]",
                dtype=tensor.dtype,
                shape=shape,
                device_type=tensor.device.type,
            )
        )
    return tuple(described)


def resized(tensor: Tensor, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """Repeat or cut a tensor along its dynamic axes."""
    for axis, dim in spec.dynamic_axes.items():
        index = torch.arange(sizes[dim.name], device=tensor.device) % max(tensor.shape[axis], 1)
        tensor = tensor.index_select(axis, index)
    return tensor


def make_case(
    module: nn.Module,
    inputs: Sequence[Tensor],
    work_dir: Path,
    *,
    axes: Sequence[Axes] | None = None,
    out_axes: Sequence[Axes] | None = None,
    tolerance: float = 1e-4,
) -> Case:
    """Make a request by hand.

    Args:
        module: Takes and returns plain tensors.
        inputs: One recorded call.
        work_dir: Folder for the engine's files.
        axes: Dims of each input, by axis; None means that all sizes are static.
        out_axes: Dims of each output, by axis.
        tolerance: Absolute and relative, for the check of engines.
    """
    module.eval()
    flat = Flat(module)
    with torch.no_grad():
        outputs = flat(*inputs)
    graph = GraphSpec(
        name="graph",
        inputs=specs("t", inputs, axes or [{}] * len(inputs)),
        outputs=specs("o", outputs, out_axes or [{}] * len(outputs)),
        call_structure=(("*",),) * len(inputs),
        result_structure=("*",),
    )

    def inputs_at(sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        return tuple(
            resized(tensor, spec, sizes) for tensor, spec in zip(inputs, graph.inputs, strict=True)
        )

    def check(engine: Engine) -> None:
        for which in ("recorded", "min", "max"):
            trial = tuple(inputs)
            if which != "recorded":
                trial = inputs_at({name: getattr(dim, which) for name, dim in graph.dims.items()})
            with torch.no_grad():
                expected = flat(*trial)
            try:
                got = engine(trial)
            except Exception as error:
                msg = f"{which}: {error}"
                raise ValidationError(msg, kind="execution", case=which) from error
            for one, other in zip(expected, got, strict=True):
                try:
                    torch.testing.assert_close(
                        other, one, rtol=tolerance, atol=tolerance, equal_nan=True
                    )
                except AssertionError as error:
                    msg = f"{which}: {error}"
                    raise ValidationError(msg, kind="values", case=which) from error

    def needed_conditions(
        engine: Engine, conditions: Sequence[SizeCondition], _: object
    ) -> tuple[SizeCondition, ...]:
        try:
            check(engine)
        except ValidationError:
            return tuple(conditions)
        return ()

    attempts: list[Attempt] = []
    request = BuildRequest(
        module=flat,
        graph=graph,
        samples=(tuple(inputs),),
        device=inputs[0].device if inputs else torch.device("cpu"),
        work_dir=work_dir,
        inputs_at=inputs_at,
        check=check,
        needed_conditions=needed_conditions,
        latencies=lambda engines: [1.0] * len(engines),
        record_attempt=attempts.append,
    )
    return Case(request, attempts)


def stored(engine: Engine, folder: Path) -> ArtifactReader:
    """Save an engine and copy its files into another folder, as a checkpoint does."""
    writer = ArtifactWriter()
    engine.save(writer)
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in writer.files.items():
        (folder / name).write_bytes(source.read_bytes())
    return ArtifactReader(folder, tuple(writer.files), dict(writer.data))


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., Case]:
    """Return a maker of cases in this test's folder."""

    def make(module: nn.Module, *inputs: Tensor, **settings: Any) -> Case:
        work_dir = tmp_path / f"work{len(list(tmp_path.iterdir()))}"
        work_dir.mkdir()
        return make_case(module, inputs, work_dir, **settings)

    return make


@pytest.fixture
def stored_in(tmp_path: Path) -> Callable[[Engine, str], ArtifactReader]:
    """Return a function that saves an engine into another folder of this test."""
    return lambda engine, name: stored(engine, tmp_path / name)
