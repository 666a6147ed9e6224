"""Sessions: created without fallback, and looked at before anything runs on them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs
import onnxruntime
import torch
from onnxruntime.capi import _pybind_state as ort_c

from aitune_backend_onnxruntime.config import ONNXExecutionProvider
from aitune_backend_onnxruntime.dtypes import dtype_of, onnx_type
from aitune_backend_onnxruntime.errors import (
    BACKEND_NAME,
    OnnxExportError,
    ProviderPlacementError,
    ProviderUnavailableError,
)
from aitune_backend_onnxruntime.exclusive import DEVICE_WORK
from aitune_core.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aitune_backend_onnxruntime.model_file import ModelFacts, Value
    from aitune_core.specs import GraphSpec, TensorSpec

__all__ = [
    "ORT_ERRORS",
    "SessionSetup",
    "check_model",
    "check_placement",
    "open_session",
    "session_error",
    "session_setup",
]

#: Everything that ONNX Runtime raises; its own classes have no base but Exception.
ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    RuntimeError,
    ValueError,
    *(
        kind
        for kind in vars(ort_c).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
)

_ERROR_SEVERITY: Final = 3
#: Operators that compute shapes. ONNX Runtime runs them on the CPU by design, where sizes live.
_SHAPE_OPERATORS: Final = frozenset(
    """
    Abs Add And Cast CastLike Ceil Concat Constant ConstantOfShape Div Equal Expand Flatten Floor
    Gather GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul
    Neg Not Or Pow Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape Round Scatter
    ScatterElements ScatterND Shape Sign Size Slice Split Sqrt Squeeze Sub Transpose Unsqueeze Where
    """.split()  # noqa: SIM905 - five lines instead of sixty
)
#: ``TensorProto.DataType`` of floating-point types.
_FLOATS: Final = frozenset({1, 10, 11, 16, 17, 18, 19, 20})
#: Gemm spends as long on copying a bias to its result as on the product, and float32 products of
#: transposed weights and few rows take several times as long as others.
_SLOW_ON_CUDA: Final = "MatMulAddFusion;GemmTransposeFusion"
#: Options of all sessions.
_ENTRIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Repeated optimization crashes on fp16 transformers (1.31.1, MatmulTransposeFusion).
        "session.graph_optimizations_loop_level": "0",
        # Weights get memory of their exact size instead of blocks of the arena.
        "session.use_device_allocator_for_initializers": "1",
        "session.record_ep_graph_assignment_info": "1",
    }
)
#: Values that describe sizes are scalars and lists.
_HIGHEST_SHAPE_RANK: Final = 1


@attrs.frozen(kw_only=True)
class SessionSetup:
    """All that decides a session, as plain data.

    Attributes:
        path: The model; files with its weights lie next to it.
        providers: Providers with options, in the order in which they take nodes.
        threads: Threads of the CPU for one operator.
        entries: Session options by key.
        log_severity: What ONNX Runtime writes to standard error, from 0 (all) to 4 (fatal).
    """

    path: Path
    providers: Sequence[tuple[str, dict[str, str]]]
    threads: int
    entries: Mapping[str, str]
    log_severity: int = _ERROR_SEVERITY

    @property
    def provider_names(self) -> list[str]:
        """Names of the providers."""
        return [name for name, _ in self.providers]

    @property
    def on_cpu(self) -> bool:
        """Whether everything runs on the CPU."""
        return self.provider_names == [ONNXExecutionProvider.CPU.ort_name]


def session_setup(path: Path, providers: Sequence[tuple[str, dict[str, str]]]) -> SessionSetup:
    """Return how a session is made of a model.

    Args:
        path: The model; files with its weights lie next to it.
        providers: Providers with options, in the order in which they take nodes.

    Source:
        ONNX Runtime's header ``onnxruntime_session_options_config_keys.h``.
    """
    on_cpu = [name for name, _ in providers] == [ONNXExecutionProvider.CPU.ort_name]
    entries = dict(_ENTRIES)
    if not on_cpu:
        entries["optimization.disable_specified_optimizers"] = _SLOW_ON_CUDA
    return SessionSetup(
        path=path,
        providers=providers,
        # PyTorch's setting is the user's; on a GPU only sizes are computed on the CPU.
        threads=torch.get_num_threads() if on_cpu else 1,
        entries=entries,
    )


def open_session(setup: SessionSetup, facts: ModelFacts) -> onnxruntime.InferenceSession:
    """Create a session from a model file.

    By path, not from bytes: weights are then mapped from the file instead of being held twice.

    Args:
        setup: What to create.
        facts: Facts of the model, for the error.

    Raises:
        ProviderUnavailableError: ONNX Runtime left out a provider.
        BuildError: The session cannot be created, such as for a missing kernel.
    """
    names = setup.provider_names
    options = onnxruntime.SessionOptions()
    options.log_severity_level = setup.log_severity
    options.intra_op_num_threads = setup.threads
    for key, value in setup.entries.items():
        options.add_session_config_entry(key, value)
    try:
        with nullcontext() if setup.on_cpu else DEVICE_WORK:
            session = onnxruntime.InferenceSession(
                str(setup.path),
                sess_options=options,
                providers=names,
                provider_options=[settings for _, settings in setup.providers],
                enable_fallback=0,
            )
    except ORT_ERRORS as error:
        raise session_error(str(error), names[0], facts) from error
    session.disable_fallback()
    got = session.get_providers()
    if got != names:
        msg = (
            f"ONNX Runtime left out {sorted(set(names) - set(got))}: asked for {names}, got {got}; "
            "its log on standard error says why"
        )
        raise ProviderUnavailableError(msg, provider=names[0], missing=names[0], available=got)
    return session


def session_error(said: str, provider: str, facts: ModelFacts) -> BuildError:
    """Return the public error for what ONNX Runtime said where it created no session."""
    text = " ".join(said.split())
    operator = re.search(r"implementation for (\w+)\(\d+\) node with name '([^']*)'", text)
    if operator:
        result = facts.results.get(operator[2])
        dtype = "these element types" if result is None else dtype_of(result.elem_type)
        msg = (
            f"{provider} has no kernel for operator {operator[1]} (node {operator[2]!r}) with "
            f"{dtype}; cast the module to float32, or choose another execution_provider or "
            f"opset_version. ONNX Runtime says: {text}"
        )
    else:
        msg = f"ONNX Runtime cannot create a session with {provider}: {text}"
    return BuildError(msg, backend_name=BACKEND_NAME, step="session")


def check_model(facts: ModelFacts, graph: GraphSpec) -> None:
    """Check that an exported model takes and returns what its graph states.

    Raises:
        OnnxExportError: An input or output is missing, has another dtype, or a fixed size where
            the graph's varies.
    """
    specs = {spec.name: spec for spec in graph.inputs}
    for value in facts.inputs:
        spec = specs.get(value.name)
        if spec is None:
            msg = f"the exported model has an input {value.name!r} that the graph does not have"
            raise OnnxExportError(msg)
        _check_value(value, spec, "input")
        for axis, dim in spec.dynamic_axes.items():
            fixed = value.shape[axis] if value.shape else None
            if fixed is not None and dim.min != dim.max:
                msg = (
                    f"the exporter fixed axis {axis} of input {spec.path!r} to {fixed}, it must "
                    f"accept {dim}: the module's code depends on this size"
                )
                raise OnnxExportError(msg, hint="record calls of one size only")
    if len(facts.outputs) != len(graph.outputs):
        msg = (
            f"the exported model has {len(facts.outputs)} outputs, the module has "
            f"{len(graph.outputs)}"
        )
        raise OnnxExportError(msg)
    for value, spec in zip(facts.outputs, graph.outputs, strict=True):
        _check_value(value, spec, "output")


def _check_value(value: Value, spec: TensorSpec, kind: str) -> None:
    expected = onnx_type(spec.dtype, spec.path)
    if value.elem_type != expected:
        msg = (
            f"{kind} {spec.path!r} is {dtype_of(value.elem_type)} in the exported model, "
            f"the module has {dtype_of(expected)}"
        )
        raise OnnxExportError(msg)
    if kind == "input" and value.shape is not None and len(value.shape) != spec.rank:
        msg = f"input {spec.path!r} has rank {len(value.shape)} in the exported model, "
        msg += f"the module's has {spec.rank}"
        raise OnnxExportError(msg)


def check_placement(
    session: Any,  # noqa: ANN401 - onnxruntime has no types
    provider: ONNXExecutionProvider,
    facts: ModelFacts,
) -> dict[str, int]:
    """Check that no operator which carries the computation fell back to the CPU.

    Args:
        session: The session.
        provider: What was asked for.
        facts: Facts of its model, which tell sizes from data.

    Returns:
        Number of nodes per ONNX Runtime provider name.

    Raises:
        ProviderPlacementError: One did, named with its count, or TensorRT took no node.
    """
    counts: Counter[str] = Counter()
    misplaced: Counter[str] = Counter()
    cpu = ONNXExecutionProvider.CPU.ort_name
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        counts[part.ep_name] += len(nodes)
        if part.ep_name == cpu != provider.ort_name:
            misplaced.update(_computing(nodes, facts))
    if misplaced:
        listed = ", ".join(f"{name} ({count})" for name, count in misplaced.most_common())
        msg = (
            f"{provider.ort_name} has no kernel for {listed}; they would run on the CPU, with a "
            "copy of their data in both directions in every call. Try another opset_version or "
            "execution_provider, or keep this module in PyTorch"
        )
        raise ProviderPlacementError(msg, provider=provider.ort_name, operators=misplaced)
    tensorrt = ONNXExecutionProvider.TENSORRT
    if provider is tensorrt and counts and provider.ort_name not in counts:
        msg = f"{provider.ort_name} took no node of this model, which would run on {dict(counts)}"
        raise ProviderPlacementError(msg, provider=provider.ort_name)
    return dict(counts)


def _computing(nodes: Iterable[Any], facts: ModelFacts) -> Iterable[str]:
    """Yield the operators of nodes that do not just compute sizes."""
    for node in nodes:
        result = facts.results.get(node.name)
        holds_data = (
            result is not None
            and result.elem_type in _FLOATS
            and result.shape is not None
            and len(result.shape) > _HIGHEST_SHAPE_RANK
        )
        if holds_data or node.op_type not in _SHAPE_OPERATORS:
            yield node.op_type
