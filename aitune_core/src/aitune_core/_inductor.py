"""PyTorch's own compiler as a backend: what ``torch.compile`` makes, without its guards."""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from aitune_core._compiling import Program, assumptions, compile_program
from aitune_core._cuda_graph_runs import CudaGraphRuns
from aitune_core._owned import inference, owned, state_memory
from aitune_core.backend import (
    ArtifactReader,
    ArtifactWriter,
    Attempt,
    Backend,
    BuildRequest,
    Engine,
)
from aitune_core.config import BackendConfig
from aitune_core.errors import BackendUnavailableError, CheckpointError, ConfigError
from aitune_core.specs import GraphSpec

__all__ = ["InductorBackend", "InductorConfig", "InductorEngine"]

_NAME: Final = "inductor"
_MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: Puts the weights into code that PyTorch keeps until the process ends.
_REFUSED_OPTIONS: Final = frozenset({"freezing"})
_CUDA_GRAPHS: Final = "triton.cudagraphs"
_SMALLEST_CAPABILITY: Final = (7, 0)


def _check_mode(_config: object, _attribute: object, value: object) -> None:
    if value not in _MODES:
        msg = f"mode must be one of {', '.join(_MODES)}, got {value!r}"
        raise ConfigError(msg, field="mode", value=value, allowed=_MODES)


def _check_options(_config: object, _attribute: object, value: object) -> None:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        msg = f"options must map names of Inductor's options to values, got {value!r}"
        raise ConfigError(msg, field="options", value=value, allowed="a mapping")
    if not value:
        return
    from torch._inductor import config  # noqa: PLC0415 - heavy

    known = config.get_config_copy()
    for name, setting in value.items():
        if name in _REFUSED_OPTIONS or name not in known:
            what = "keeps weights beyond the engine" if name in _REFUSED_OPTIONS else "is unknown"
            msg = (
                f"Inductor's option {name!r} {what}; leave it out, torch._inductor.list_options() "
                "names all"
            )
            raise ConfigError(msg, field="options", value=name, allowed=tuple(sorted(known)))
        _check_setting(name, setting, known[name])


def _check_setting(name: str, setting: object, default: object) -> None:
    try:
        json.dumps(setting, allow_nan=False)
        wanted = "a JSON value" if default is None else f"of type {type(default).__name__}"
        fits = default is None or type(setting) is type(default)
    except (TypeError, ValueError):
        wanted, fits = "a JSON value", False
    if not fits:
        msg = f"Inductor's option {name!r} must be {wanted}, got {setting!r}"
        raise ConfigError(msg, field="options", value=setting, allowed=wanted)


def _copied(value: object) -> object:
    return copy.deepcopy(dict(value)) if isinstance(value, Mapping) else value


@attrs.frozen(kw_only=True)
class InductorConfig(BackendConfig):
    """Settings of `InductorBackend`.

    Args:
        mode: What ``torch.compile`` knows under this name: ``"default"``;
            ``"reduce-overhead"``, which on CUDA replays graphs, one per tuple of sizes, captured
            during the first calls with them; ``"max-autotune"``, which tries many kernels and
            replays graphs as well; ``"max-autotune-no-cudagraphs"``. Where graphs are replayed,
            calls from several threads run one after the other, and results are copies.
        options: Further options of Inductor, as in ``torch.compile(options=...)``; they go before
            those of the mode.

    Raises:
        ConfigError: A value cannot be used.
    """

    mode: str = attrs.field(default="default", validator=_check_mode)
    options: Mapping[str, Any] = attrs.field(
        factory=dict, converter=_copied, validator=_check_options, hash=False
    )

    @property
    def inductor_options(self) -> dict[str, Any]:
        """All options that Inductor gets."""
        from torch._inductor import list_mode_options  # noqa: PLC0415 - heavy

        return {**list_mode_options(self.mode), **self.options}


class InductorEngine(Engine):
    """Runs a compiled program.

    Args:
        graph: The graph.
        device: Where the program runs.
        program: The program.
        cuda_graphs: Whether it replays CUDA graphs.
    """

    def __init__(
        self, graph: GraphSpec, device: torch.device, program: Program, *, cuda_graphs: bool
    ) -> None:
        super().__init__(graph, device, _NAME)
        self._memory = state_memory(program.state)
        self._run: Program | CudaGraphRuns | None = (
            CudaGraphRuns(program, device) if cuda_graphs else program
        )

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the program.

        Raises:
            EngineClosedError: The engine was closed.
        """
        run = self._run  # held until the run is over, so that close() may come meanwhile
        if run is None:
            self.fail_closed("run")
        with inference(self.device):
            return owned(run(inputs), inputs, self._memory)

    def save(self, artifacts: ArtifactWriter) -> None:  # noqa: ARG002
        """Refuse.

        Raises:
            CheckpointError: Always; code for this machine is never loaded from a file.
        """
        msg = (
            f"graph {self.graph.name!r} was compiled by Inductor to native code for this machine, "
            "which a checkpoint does not hold; tune the module again where it is used (Inductor's "
            "own cache makes that quick), or use a backend that can be stored, such as "
            "'onnxruntime'"
        )
        raise CheckpointError(msg, expected="an engine that can be stored", got=_NAME)

    def release(self) -> None:
        """Let code and weights go."""
        self._run = None


class InductorBackend(Backend):
    """Compiles modules with ``torch.export`` and Inductor, for all sizes of a graph at once.

    Flags of the process that the compiler looks at (deterministic algorithms, number of threads,
    precision of matrix products) are those at the time of building; later changes reach only the
    operators that are not compiled.

    Args:
        config: An `InductorConfig`; None means all defaults.

    Raises:
        ConfigError: The configuration is of another class.
    """

    name: ClassVar[str] = _NAME
    config_class: ClassVar[type[BackendConfig]] = InductorConfig
    config: InductorConfig

    def check_available(self, device: torch.device) -> None:
        """Check that what compiles for ``device`` is here.

        Raises:
            BackendUnavailableError: It is not; the error says how to get it.
        """
        if device.type == "cpu":
            _check_compiler()
        elif device.type == "cuda":
            _check_triton(device)
        else:
            msg = f"backend {_NAME!r} compiles for the CPU and for CUDA devices, got {device}"
            raise BackendUnavailableError(msg, backend_name=_NAME, missing=str(device))

    def build(self, request: BuildRequest) -> InductorEngine:
        """Compile the request's module.

        Raises:
            BackendUnavailableError: No compiler is here.
            BuildError: The module cannot be followed, because it branches on values or leaves
                PyTorch, or cannot be compiled; the cause is PyTorch's error.
        """
        self.check_available(request.device)
        options = self.config.inductor_options
        program = compile_program(request, options)
        engine = InductorEngine(
            request.graph,
            request.device,
            program,
            cuda_graphs=request.device.type == "cuda" and bool(options.get(_CUDA_GRAPHS)),
        )
        needed = request.needed_conditions(
            engine, program.conditions, functools.partial(assumptions, request)
        )
        engine.limit_sizes(needed)
        detail = f"takes sizes with {' and '.join(map(str, needed))}" if needed else ""
        step = f"export, then compile in mode {self.config.mode!r}"
        request.record_attempt(Attempt(step, succeeded=True, detail=detail))
        return engine

    def load(
        self,
        artifacts: ArtifactReader,  # noqa: ARG002
        graph: GraphSpec,
        device: torch.device,  # noqa: ARG002
    ) -> InductorEngine:
        """Refuse.

        Raises:
            CheckpointError: Always; none is ever stored.
        """
        msg = (
            f"engines of {_NAME!r} are native code and are not stored, so none can be loaded for "
            f"graph {graph.name!r}; tune the module again"
        )
        raise CheckpointError(msg, expected="a stored engine", got=_NAME)


def _check_compiler() -> None:
    if sys.platform == "win32":
        msg = f"backend {_NAME!r} is not supported on Windows; use 'onnxruntime' there"
        raise BackendUnavailableError(msg, backend_name=_NAME, missing="Windows")
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415 - heavy
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        hint = "install g++ (apt-get install g++), or name a compiler in the variable CXX"
        msg = f"backend {_NAME!r} needs a C++ compiler on the CPU, and none works here; {hint}"
        raise BackendUnavailableError(
            msg, backend_name=_NAME, missing="a C++ compiler", install_hint=hint
        ) from error


def _check_triton(device: torch.device) -> None:
    from torch.utils._triton import has_triton_package  # noqa: PLC0415

    if not torch.cuda.is_available():
        msg = f"backend {_NAME!r} cannot compile for {device}: PyTorch finds no CUDA device"
        raise BackendUnavailableError(msg, backend_name=_NAME, missing=str(device))
    if not has_triton_package():
        hint = "python -m pip install triton"
        msg = f"backend {_NAME!r} needs Triton on CUDA, which is not installed; run: {hint}"
        raise BackendUnavailableError(msg, backend_name=_NAME, missing="triton", install_hint=hint)
    capability = torch.cuda.get_device_capability(device)
    if capability < _SMALLEST_CAPABILITY:
        msg = (
            f"backend {_NAME!r} needs a device of compute capability 7.0 or newer, {device} has "
            f"{'.'.join(map(str, capability))}"
        )
        raise BackendUnavailableError(msg, backend_name=_NAME, missing="compute capability 7.0")
