"""The backend: export, session and engine put together."""

from __future__ import annotations

import functools
import traceback
from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, Final

import onnxruntime
import torch
from torch import nn

from aitune_backend_onnxruntime.config import ONNXExecutionProvider, ONNXRuntimeBackendConfig
from aitune_backend_onnxruntime.diagnosis import diagnoses
from aitune_backend_onnxruntime.dtypes import check_dtypes
from aitune_backend_onnxruntime.engine import (
    ExportedModel,
    ONNXRuntimeEngine,
    RewrittenModel,
    open_engine,
)
from aitune_backend_onnxruntime.errors import BACKEND_NAME, OnnxExportError
from aitune_backend_onnxruntime.export import (
    ExportPlan,
    assumptions,
    export,
    export_plans,
    older_plan,
)
from aitune_backend_onnxruntime.export_errors import depends_on_values, failed_in_translation
from aitune_backend_onnxruntime.graph_setup import capture_recorded, capture_stored
from aitune_backend_onnxruntime.model_file import facts_of, read_model
from aitune_backend_onnxruntime.precision import first_overflow, lowered
from aitune_backend_onnxruntime.providers import check_provider, resolve_provider
from aitune_backend_onnxruntime.rewriting import rewrite_file
from aitune_backend_onnxruntime.samples import export_inputs
from aitune_backend_onnxruntime.session import check_model
from aitune_backend_onnxruntime.session_trial import trial_of
from aitune_backend_onnxruntime.stored import read_stored
from aitune_backend_onnxruntime.variants import faster_of, fastest
from aitune_core.backend import Attempt, Backend
from aitune_core.errors import BuildError, ValidationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from aitune_core.backend import ArtifactReader, BuildRequest, Diagnosis
    from aitune_core.config import BackendConfig
    from aitune_core.specs import GraphSpec

__all__ = ["ONNXRuntimeBackend"]

#: What may be behind a difference of `torch.nn.TransformerEncoder`.
_PADDING: Final = (
    "note: with a padding mask, nn.TransformerEncoder's fused eager path writes zeros at padded "
    "places, which no export does; make it with enable_nested_tensor=False"
)
#: Operators of newer opsets without a kernel on CUDA.
_TAKEN_APART: Final = frozenset({"GroupNormalization"})
_FROZEN: Final = "not tried: the module's code looks at values, which a trace would freeze"


class ONNXRuntimeBackend(Backend):
    """Builds engines by ONNX export and runs them with ONNX Runtime.

    Args:
        config: An `ONNXRuntimeBackendConfig`; None means all defaults.

    Raises:
        ConfigError: The configuration is of another class.
    """

    name: ClassVar[str] = BACKEND_NAME
    config_class: ClassVar[type[BackendConfig]] = ONNXRuntimeBackendConfig
    config: ONNXRuntimeBackendConfig

    def check_available(self, device: torch.device) -> None:
        """Check that the execution provider runs on ``device`` and that its libraries load.

        Raises:
            ProviderUnavailableError: It does not; names what is missing and how to get it.
        """
        check_provider(resolve_provider(self.config.execution_provider, device))

    def diagnose(self) -> Sequence[Diagnosis]:
        """Try every execution provider by running a model on it."""
        return tuple(diagnoses())

    def fingerprint(self, device: torch.device) -> Mapping[str, str]:
        """Return versions of what exports and runs models, and how ONNX Runtime was compiled."""
        return {**(super().fingerprint(device) or {}), "ONNX Runtime": onnxruntime.get_build_info()}

    def build(self, request: BuildRequest) -> ONNXRuntimeEngine:
        """Export the request's module and make a session for it.

        Ways to export are tried until one gives an engine that passes ``request.check``.

        Raises:
            ProviderUnavailableError: The execution provider cannot be used here.
            UnsupportedDtypeError: A tensor has an element type that ONNX Runtime cannot take.
            OnnxExportError: No exporter could export the module.
            BuildError: No way to build gave a correct engine; lists what was tried.
        """
        self.check_available(request.device)
        check_dtypes((*request.graph.inputs, *request.graph.outputs))
        on_device = (
            torch.cuda.device(request.device) if request.device.type == "cuda" else nullcontext()
        )
        with on_device:
            return self._build(request)

    def _build(self, request: BuildRequest) -> ONNXRuntimeEngine:
        if self.config.precision is not None:
            request = lowered(request, self.config.precision, self.config.float32_parts)
        inputs = export_inputs(request)
        failures: list[tuple[ExportPlan, BuildError | ValidationError]] = []
        plans = deque(export_plans(self.config, request.graph))
        while plans:
            plan = plans.popleft()
            if plan.exporter == "tracer" and any(depends_on_values(error) for _, error in failures):
                request.record_attempt(Attempt(plan.step, succeeded=False, detail=_FROZEN))
                continue
            try:
                engine = self._attempt(plan, request, inputs)
            except (BuildError, ValidationError) as error:
                failures.append((plan, error))
                _drop_locals(error)
                if self._worth_older_opset(plan, error, failures):
                    plans.extendleft(filter(None, [older_plan(plan)]))
                request.record_attempt(
                    Attempt(plan.step, succeeded=False, detail=_detail(plan, error))
                )
            else:
                engine = self._or_older(plan, engine, request, inputs)
                dtype = engine.compute_dtype
                notes = (
                    plan.note,
                    _limits(request.graph, engine.graph),
                    "" if dtype is None else f"computes in {str(dtype).removeprefix('torch.')}",
                )
                detail = "; ".join(filter(None, notes))
                request.record_attempt(Attempt(plan.step, succeeded=True, detail=detail))
                return engine
        raise _summary(failures, request, self._advice(failures, request))

    def _or_older(
        self,
        plan: ExportPlan,
        engine: ONNXRuntimeEngine,
        request: BuildRequest,
        inputs: tuple[Tensor, ...],
    ) -> ONNXRuntimeEngine:
        """Try an older opset where CUDA has no kernels for newer operators; keep the faster one.

        Those are taken apart into others, which the older opset's exporter does better for some.
        """
        older = older_plan(plan)
        if (
            older is None
            or self.config.opset_version is not None
            or engine.provider is not ONNXExecutionProvider.CUDA
            or _TAKEN_APART.isdisjoint(engine.model.facts.operators)
        ):
            return engine
        return faster_of(older.step, engine, request, lambda: self._attempt(older, request, inputs))

    def _advice(
        self,
        failures: list[tuple[ExportPlan, BuildError | ValidationError]],
        request: BuildRequest,
    ) -> str:
        """Say what may help where half precision is the reason, or a padding mask."""
        lines = [_PADDING] if any(map(_skips_padding, request.module.modules())) else []
        differs = any(isinstance(error, ValidationError) for _, error in failures)
        if self.config.precision is not None and differs:
            part = first_overflow(request)
            found = "" if part is None else f": part {part!r} overflows"
            lines.append(
                f"note: computed in {self.config.precision.dtype}{found}; parts that "
                "float32_parts names stay in float32, and precision='bf16' overflows later"
            )
        return "\n".join(lines)

    def _worth_older_opset(
        self,
        plan: ExportPlan,
        error: BuildError | ValidationError,
        failures: list[tuple[ExportPlan, BuildError | ValidationError]],
    ) -> bool:
        """Whether the module was captured and the newest operators may be what went wrong.

        A provider may have no kernel for them, or one that takes less: attention with a mask that
        is broadcast over the queries, for one. Tried for one way of exporting only.
        """
        return (
            self.config.opset_version is None
            and plan.exporter == "dynamo"
            and (not isinstance(error, OnnxExportError) or failed_in_translation(error))
            and all(tried.opset == plan.opset for tried, _ in failures)
        )

    def _attempt(
        self, plan: ExportPlan, request: BuildRequest, inputs: tuple[Tensor, ...]
    ) -> ONNXRuntimeEngine:
        exported = export(plan, request, inputs)
        path = exported.path
        facts = facts_of(read_model(path))
        check_model(facts, request.graph)
        provider = resolve_provider(self.config.execution_provider, request.device)
        cache_dir = None
        if provider is ONNXExecutionProvider.TENSORRT:
            cache_dir = request.work_dir / "tensorrt"
            cache_dir.mkdir(exist_ok=True)
        on_cuda = provider is ONNXExecutionProvider.CUDA
        model = ExportedModel(
            path=path,
            facts=facts,
            exporter=plan.exporter,
            options=self.config.to_options(),
            rewritten=_rewritten(path) if on_cuda else None,
            channels_last=facts.half_convolutions,
        )
        trial = trial_of(request, self.config.isolate_seconds) if self.config.isolate else None
        engine = open_engine(
            request.graph,
            request.device,
            model=model,
            provider=provider,
            cache_dir=cache_dir,
            trial=trial,
        )
        notes: dict[ONNXRuntimeEngine, Attempt] = {}
        try:
            follow = functools.partial(assumptions, request)
            engine.limit_sizes(request.needed_conditions(engine, exported.conditions, follow))
            request.check(engine)
            if not on_cuda:
                return engine
            if engine.can_have_graphs:
                notes[engine] = capture_recorded(engine, request)
        except BaseException:
            engine.close()
            raise

        def opened(model: ExportedModel) -> ONNXRuntimeEngine:
            other = open_engine(
                engine.graph,
                request.device,
                model=model,
                provider=provider,
                cache_dir=None,
                trial=trial,
            )
            try:
                request.check(other)
                if other.can_have_graphs:
                    notes[other] = capture_recorded(other, request)
            except BaseException:
                other.close()
                raise
            return other

        best = fastest(engine, request, opened)
        if best in notes:
            request.record_attempt(notes[best])
        return best

    def load(
        self, artifacts: ArtifactReader, graph: GraphSpec, device: torch.device
    ) -> ONNXRuntimeEngine:
        """Restore an engine from its ONNX model.

        The device decides the provider: CPU on the CPU; on CUDA the configured one, else the one
        that the engine was stored with, else CUDA. TensorRT builds its engine anew: a stored one
        would be native code of foreign origin.

        Raises:
            ProviderUnavailableError: The provider cannot be used here.
            CheckpointError: The stored data cannot be used, or must not be trusted.
        """
        stored = read_stored(artifacts, graph)
        provider = self._provider_on(device, stored.provider)
        check_provider(provider)
        engine = open_engine(
            graph,
            device,
            model=stored.model,
            provider=provider,
            cache_dir=None,
            copies=stored.copies if provider is stored.provider else None,
        )
        if engine.can_have_graphs:
            try:
                capture_stored(engine, stored.graph_sizes)
            except BaseException:
                engine.close()
                raise
        return engine

    def _provider_on(
        self, device: torch.device, stored: ONNXExecutionProvider
    ) -> ONNXExecutionProvider:
        for wanted in (self.config.execution_provider, stored):
            if wanted is not None and wanted.device_type == device.type:
                return wanted
        return resolve_provider(None, device)


def _limits(wanted: GraphSpec, graph: GraphSpec) -> str:
    added = graph.conditions[len(wanted.conditions) :]
    return f"for sizes with {' and '.join(map(str, added))}" if added else ""


def _detail(plan: ExportPlan, error: Exception) -> str:
    return str(error).removeprefix(plan.step).lstrip()


def _drop_locals(error: BaseException | None) -> None:
    """Free what the frames of an error still hold: copies of a model are large."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _rewritten(path: Path) -> RewrittenModel | None:
    """Write the model with operators that are faster on CUDA, beside the model."""
    target = path.with_name("model_cuda.onnx")
    if not rewrite_file(path, target):
        return None
    return RewrittenModel(target, facts_of(read_model(target)))


def _skips_padding(part: nn.Module) -> bool:
    return isinstance(part, nn.TransformerEncoder) and bool(part.use_nested_tensor)


def _summary(
    failures: list[tuple[ExportPlan, BuildError | ValidationError]],
    request: BuildRequest,
    advice: str,
) -> BuildError:
    """Return one error for all attempts, caused by the most telling one."""
    checks = [error for _, error in failures if isinstance(error, ValidationError)]
    builds = [error for _, error in failures if not isinstance(error, OnnxExportError)]
    cause = (*checks, *builds, *(error for _, error in failures))[0]
    lines = [
        f"  {number}. {plan.step}: {_detail(plan, error)}"
        for number, (plan, error) in enumerate(failures, 1)
    ]
    ways = "the only way" if len(failures) == 1 else f"any of {len(failures)} ways"
    msg = "\n".join((f"graph {request.graph.name!r} could not be built in {ways}:", *lines))
    if advice:
        msg += f"\n{advice}"
    if isinstance(cause, OnnxExportError):
        summary: BuildError = OnnxExportError(msg, exporter=cause.exporter, hint=cause.hint)
    else:
        step = "check" if isinstance(cause, ValidationError) else cause.step
        summary = BuildError(msg, backend_name=BACKEND_NAME, step=step)
    summary.__cause__ = cause
    return summary
