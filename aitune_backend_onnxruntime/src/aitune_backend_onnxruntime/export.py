"""Export: a module on flat tensors becomes ``model_raw.onnx`` and one file with its weights."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs
import onnx
import torch
from torch import nn

from aitune_backend_onnxruntime.attention import ATTENTION_OPSET, plain_attention
from aitune_backend_onnxruntime.config import TRACER_OPSETS
from aitune_backend_onnxruntime.constants import exact_constants
from aitune_backend_onnxruntime.export_errors import export_error
from aitune_backend_onnxruntime.guards import export_conditions, trace_conditions
from aitune_backend_onnxruntime.indexing import untraceable_indexing
from aitune_backend_onnxruntime.kernels import right_kernels
from aitune_backend_onnxruntime.model_file import read_model
from aitune_backend_onnxruntime.operators import ExactOperators
from aitune_backend_onnxruntime.parts import keep_part
from aitune_backend_onnxruntime.patching import bytecode_followed_unless, confined_to_this_thread
from aitune_backend_onnxruntime.quiet import quiet_export
from aitune_backend_onnxruntime.reads import hidden_reads, reads
from aitune_backend_onnxruntime.rotary import broadcast_rotary_caches
from aitune_backend_onnxruntime.samples import varying_axes
from aitune_backend_onnxruntime.weight_norm import plain_weight_norm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from aitune_backend_onnxruntime.config import ONNXRuntimeBackendConfig
    from aitune_core.backend import BuildRequest
    from aitune_core.conditions import SizeCondition
    from aitune_core.specs import GraphSpec, TensorSpec

__all__ = [
    "DEFAULT_OPSET",
    "MODEL_FILE",
    "WEIGHTS_FILE",
    "Export",
    "ExportPlan",
    "assumptions",
    "export",
    "export_plans",
    "older_plan",
]

MODEL_FILE: Final = "model_raw.onnx"
WEIGHTS_FILE: Final = "model_raw.onnx.data"
#: 23 is the first opset with an Attention operator: faster on CUDA, and right for rows of a mask
#: that hide everything, where the decomposition of opsets up to 22 is not.
DEFAULT_OPSET: Final = 23
#: ONNX Runtime's CUDA provider has pooling for this opset, and not for 22 and later.
_OLDER_OPSET: Final = 20

#: Exporters and their silencers change settings of the process: one export at a time.
_ONE_EXPORT: Final = threading.Lock()
#: Weights smaller than this stay in the model file, in bytes.
_SMALL_WEIGHT: Final = 1024
#: Parts of the tracer's warnings about values that leave the trace.
_FROZEN_VALUES: Final = (
    "to a NumPy array",
    "to a Python list",
    "registered as constants",
    "results are registered",
)

#: What Python raises where sizes that are followed are used as keys, names or words.
_OF_SIZES: Final = (LookupError, AttributeError, TypeError, ValueError)

#: Part of the tracer's warnings about numbers and branches that follow from sizes or values.
_DECIDED: Final = "might cause the trace to be incorrect"

Exporter: TypeAlias = Literal["dynamo", "tracer"]
Shapes: TypeAlias = Literal["static", "dynamic", "auto"]


@attrs.frozen(kw_only=True)
class ExportPlan:
    """One way to export.

    Attributes:
        step: Its name in reports.
        exporter: Who exports.
        shapes: How axes that vary are declared to the dynamo exporter.
        opset: ONNX opset to write.
        note: What to know about it.
    """

    step: str
    exporter: Exporter
    shapes: Shapes
    opset: int
    note: str = ""


@attrs.frozen(kw_only=True)
class Export:
    """An exported module.

    Attributes:
        path: The model; weights of more than 1 KiB lie in one file next to it.
        conditions: What the exporter took for granted about sizes.
    """

    path: Path
    conditions: tuple[SizeCondition, ...] = ()


def export_plans(config: ONNXRuntimeBackendConfig, graph: GraphSpec) -> tuple[ExportPlan, ...]:
    """Return the ways to export a graph, best first."""
    wanted = config.opset_version or DEFAULT_OPSET
    opset = min(wanted, TRACER_OPSETS[-1])
    note = "" if config.opset_version in {None, opset} else f"opset {opset} is the tracer's highest"
    tracer = ExportPlan(
        step="export with the tracer", exporter="tracer", shapes="static", opset=opset, note=note
    )
    if not config.use_dynamo:
        return (tracer,)
    ways: tuple[Shapes, ...] = ("static",)
    if _varies(graph):
        ways = ("dynamic", "auto")
    names = {
        "static": "export with dynamo",
        "dynamic": "export with dynamo, Dim.DYNAMIC",
        "auto": "export with dynamo, Dim.AUTO",
    }
    dynamo = (
        ExportPlan(step=names[shapes], exporter="dynamo", shapes=shapes, opset=wanted)
        for shapes in ways
    )
    return (*dynamo, tracer)


def older_plan(plan: ExportPlan) -> ExportPlan | None:
    """Return the plan with an older opset; None where it has that already."""
    if plan.opset <= _OLDER_OPSET:
        return None
    return attrs.evolve(plan, step=f"{plan.step}, opset {_OLDER_OPSET}", opset=_OLDER_OPSET)


def export(plan: ExportPlan, request: BuildRequest, inputs: Sequence[Tensor]) -> Export:
    """Export the request's module.

    The files are written to a folder of their own and then moved into ``request.work_dir``, so
    that a session which still has older ones mapped keeps what it has.

    Args:
        plan: How to export.
        request: Module, graph and folder.
        inputs: Flat inputs to trace with; they are not written to.

    Raises:
        OnnxExportError: The exporter refused; its error is the cause.
    """
    # Fresh tensors: the exporter leaves marks about dynamic axes on those that it gets.
    inputs = tuple(tensor.detach().clone() for tensor in inputs)
    modes = [(part, part.training) for part in request.module.modules()]
    folder = Path(tempfile.mkdtemp(prefix="export-", dir=request.work_dir))
    conditions: tuple[SizeCondition, ...] = ()
    try:
        with _exporting(plan), torch.no_grad():
            if plan.exporter == "dynamo":
                conditions = _export_with_dynamo(plan, request, inputs, folder / MODEL_FILE)
            else:
                conditions = _export_with_tracer(plan, request, inputs, folder / MODEL_FILE)
        _finish(folder / MODEL_FILE)
        return Export(path=_move(folder, request.work_dir), conditions=conditions)
    except Exception as error:  # exporters raise errors of every kind
        raise export_error(plan, request.graph, error) from error
    finally:
        for part, training in modes:
            part.training = training
        shutil.rmtree(folder, ignore_errors=True)
        # Exporters leave cycles that hold their graphs, and the frames of everybody who called.
        gc.collect()


@contextmanager
def _exporting(plan: ExportPlan | None = None) -> Iterator[None]:
    """Prepare PyTorch for an export in this thread."""
    with (
        _ONE_EXPORT,
        quiet_export(),
        confined_to_this_thread(),
        plain_attention(
            operator=plan is not None
            and plan.exporter == "dynamo"
            and plan.opset >= ATTENTION_OPSET
        ),
        plain_weight_norm(),
        exact_constants(),
        ExactOperators() as operators,
        bytecode_followed_unless(lambda: operators.refused),
    ):
        yield


def assumptions(request: BuildRequest, inputs: Sequence[Tensor]) -> tuple[SizeCondition, ...]:
    """Return what the request's module takes for granted of the sizes of inputs.

    Raises:
        Exception: Of any kind, where the module cannot be followed without data.
    """
    with _exporting():
        return trace_conditions(request.module, inputs, request.graph)


def _export_with_dynamo(
    plan: ExportPlan, request: BuildRequest, inputs: tuple[Tensor, ...], path: Path
) -> tuple[SizeCondition, ...]:
    graph = request.graph
    way = hidden_reads(request.module, inputs)
    if way is not None:
        msg = f"the module's Python code reads values ({way}), which an export freezes"
        raise ValueError(msg)
    shapes = tuple(_dynamic_shapes(spec, plan.shapes) for spec in graph.inputs)
    program = torch.onnx.export(
        request.module,
        inputs,
        str(path),
        dynamo=True,
        # One entry: forward(self, *inputs) has one parameter, which holds all tensors.
        dynamic_shapes=(shapes,),
        input_names=[spec.name for spec in graph.inputs],
        output_names=[spec.name for spec in graph.outputs],
        opset_version=plan.opset,
        external_data=True,
        verbose=False,
    )
    if program is None or program.exported_program is None:
        msg = "the exporter returned no program to read its assumptions about sizes from"
        raise RuntimeError(msg)
    return export_conditions(program.exported_program, graph)


def _dynamic_shapes(spec: TensorSpec, shapes: Shapes) -> dict[int, Any]:
    hint = torch.export.Dim
    if shapes == "dynamic":
        return {
            axis: hint.DYNAMIC(min=dim.min, max=dim.max) for axis, dim in varying_axes(spec).items()
        }
    return dict.fromkeys(varying_axes(spec), hint.AUTO)


class _OnDevice(nn.Module):
    """A module that makes its tensors on the default device of its caller."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.device = device
        self.training = module.training

    def forward(self, *inputs: Tensor) -> Any:  # noqa: ANN401
        with self.device:
            return self.module(*inputs)


def _export_with_tracer(
    plan: ExportPlan, request: BuildRequest, inputs: tuple[Tensor, ...], path: Path
) -> tuple[SizeCondition, ...]:
    graph = request.graph
    axes = {
        spec.name: {axis: dim.name for axis, dim in spec.dynamic_axes.items()}
        for spec in (*graph.inputs, *graph.outputs)
        if spec.dynamic_axes
    }
    # The tracer makes constants of its own, and crashes where the default device is a GPU.
    default = torch.get_default_device()
    with warnings.catch_warnings(record=True) as caught, torch.device("cpu"):
        warnings.simplefilter("always", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        torch.onnx.export(
            _OnDevice(request.module, default),
            inputs,
            str(path),
            dynamo=False,
            dynamic_axes=axes,
            input_names=[spec.name for spec in graph.inputs],
            output_names=[spec.name for spec in graph.outputs],
            opset_version=plan.opset,
            verbose=False,
        )
    conditions = _check_trace([str(one.message) for one in caught], request, inputs)
    # The tracer embeds weights, or writes one file for each of them when they exceed 2 GB.
    loose = set(path.parent.iterdir()) - {path}
    model = onnx.load(path)
    onnx.save_model(
        model,
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=WEIGHTS_FILE,
        size_threshold=_SMALL_WEIGHT,
    )
    for file in loose - {path.parent / WEIGHTS_FILE}:
        file.unlink()
    return conditions


def _check_trace(
    messages: Sequence[str], request: BuildRequest, inputs: Sequence[Tensor]
) -> tuple[SizeCondition, ...]:
    """Refuse a trace in which Python saw values, and return what it took for granted of sizes."""
    for message in messages:
        if any(sign in message for sign in _FROZEN_VALUES):
            msg = f"the module's Python code depends on values, which a trace freezes: {message}"
            raise ValueError(msg)
    way = reads(request.module, inputs)
    if way is not None:
        msg = f"the module's Python code reads values ({way}), which a trace freezes"
        raise ValueError(msg)
    fault = untraceable_indexing(request.module, inputs)
    if fault is not None:
        msg = f"the module uses {fault}"
        raise ValueError(msg)
    try:
        return trace_conditions(request.module, inputs, request.graph)
    except Exception as error:  # noqa: BLE001 - of every kind: the module runs without data
        decided = next((message for message in messages if _DECIDED in message), None)
        if decided is None and (not isinstance(error, _OF_SIZES) or not _varies(request.graph)):
            # No Python code chose between branches or made numbers: there is nothing to freeze.
            return ()
        reason = str(error).partition("\n")[0] or type(error).__name__
        msg = (
            "the module's Python code depends on values, or on sizes in a way that cannot be "
            f"followed ({reason}), which a trace freezes" + (f": {decided}" if decided else "")
        )
        raise ValueError(msg) from None


def _varies(graph: GraphSpec) -> bool:
    return any(varying_axes(spec) for spec in graph.inputs)


def _finish(path: Path) -> None:
    """Mend what exporters leave behind in a model."""
    model = read_model(path)
    broadcast_rotary_caches(model)
    model = right_kernels(model)
    _tidy(model)
    path.write_bytes(model.SerializeToString())


def _tidy(model: onnx.ModelProto) -> None:
    """Drop what exporters note about the user's source: file paths, lines of code, class names.

    Names of parts stay, as they do in names of weights.
    """
    del model.metadata_props[:]
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        del graph.metadata_props[:]
        graph.doc_string = ""
        for entry in (*graph.node, *graph.input, *graph.output, *graph.value_info):
            if isinstance(entry, onnx.NodeProto):
                keep_part(entry)
            else:
                del entry.metadata_props[:]
            entry.doc_string = ""
        for tensor in graph.initializer:
            del tensor.metadata_props[:]
            tensor.doc_string = ""
        for node in graph.node:
            for attribute in node.attribute:
                graphs += ([attribute.g] if attribute.HasField("g") else []) + [*attribute.graphs]


def _move(folder: Path, work_dir: Path) -> Path:
    weights = folder / WEIGHTS_FILE
    if weights.exists():
        weights.replace(work_dir / WEIGHTS_FILE)
    else:
        (work_dir / WEIGHTS_FILE).unlink(missing_ok=True)
    return (folder / MODEL_FILE).replace(work_dir / MODEL_FILE)
