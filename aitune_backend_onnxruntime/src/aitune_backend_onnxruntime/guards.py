"""What an export took for granted about sizes, as conditions on a graph's dims.

An exported program or a trace holds the one path that its sample took. The branches on sizes that
led there are known to the shape environment of the export, but an ONNX model has no place for
them. A trace has no such environment: the module runs once more, on tensors of symbolic sizes.
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from aitune_backend_onnxruntime.recurrent import recurrent_shapes
from aitune_core.conditions import SizeCondition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from aitune_core.specs import DynamicDim, GraphSpec, TensorSpec

__all__ = ["export_conditions", "trace_conditions"]


class _Printer(PythonPrinter):
    """Prints functions of sizes by the names that conditions know."""

    def _print_Float(self, expr: Any) -> str:  # noqa: ANN401, N802 - named by sympy
        return repr(float(expr))

    def _print_ToFloat(self, expr: Any) -> str:  # noqa: ANN401, N802
        return f"float({self._print(expr.args[0])})"

    def _print_TruncToInt(self, expr: Any) -> str:  # noqa: ANN401, N802
        return f"trunc({self._print(expr.args[0])})"

    def _print_FloorToInt(self, expr: Any) -> str:  # noqa: ANN401, N802
        return f"floor({self._print(expr.args[0])})"

    def _print_CeilToInt(self, expr: Any) -> str:  # noqa: ANN401, N802
        return f"ceil({self._print(expr.args[0])})"

    def _print_floor(self, expr: Any) -> str:  # noqa: ANN401
        return f"floor({self._print(expr.args[0])})"

    def _print_ceiling(self, expr: Any) -> str:  # noqa: ANN401
        return f"ceil({self._print(expr.args[0])})"

    def _print_Where(self, expr: Any) -> str:  # noqa: ANN401, N802
        test, body, otherwise = (self._print(part) for part in expr.args)
        return f"(({body}) if ({test}) else ({otherwise}))"

    def _print_OpaqueUnaryFn_sqrt(self, expr: Any) -> str:  # noqa: ANN401, N802
        return f"sqrt({self._print(expr.args[0])})"


def export_conditions(program: ExportedProgram, graph: GraphSpec) -> tuple[SizeCondition, ...]:
    """Return the conditions on dims under which an exported program is the module.

    Those that sizes in the ranges of the dims always meet may be among them. Those on values
    inside the graph are not: eager raises where they do not hold.

    Args:
        program: The program; its user inputs are the graph's, in order.
        graph: The graph.

    Raises:
        ValueError: A condition cannot be written as a `SizeCondition`.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [values[str(name)] for name in program.graph_signature.user_inputs]
    return _conditions(inputs, graph)


def trace_conditions(
    module: nn.Module, inputs: Sequence[Tensor], graph: GraphSpec
) -> tuple[SizeCondition, ...]:
    """Return the conditions on dims under which a trace with these inputs is the module.

    Args:
        module: A copy of it runs, in which tensors have no data.
        inputs: What it is traced with.
        graph: The graph.

    Raises:
        Exception: What the module raises where its Python code needs values, or where it has parts
            that cannot run without data.
    """
    environment = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    state = (*module.parameters(), *module.buffers())
    module = copy.deepcopy(
        module, {id(tensor): mode.from_tensor(tensor, static_shapes=True) for tensor in state}
    )
    with torch.no_grad(), enable_python_dispatcher(), recurrent_shapes(), mode:
        symbolic = [
            mode.from_tensor(tensor, symbolic_context=_symbolic(spec))
            for spec, tensor in zip(graph.inputs, inputs, strict=True)
        ]
        module(*symbolic)
    return _conditions(symbolic, graph)


def _symbolic(spec: TensorSpec) -> StatelessSymbolicContext[Any, Any]:
    free = spec.dynamic_axes
    kinds = (DimDynamic.DYNAMIC, DimDynamic.STATIC)
    return StatelessSymbolicContext(
        dynamic_sizes=[kinds[axis not in free] for axis in range(len(spec.shape))]
    )


def _conditions(inputs: Iterable[Tensor], graph: GraphSpec) -> tuple[SizeCondition, ...]:
    """Return what was found out about the symbolic sizes of a graph's inputs."""
    sizes: list[tuple[DynamicDim, int | torch.SymInt]] = [
        (dim, tensor.shape[axis])
        for spec, tensor in zip(graph.inputs, inputs, strict=True)
        for axis, dim in spec.dynamic_axes.items()
    ]
    symbolic = [(dim, size.node) for dim, size in sizes if isinstance(size, torch.SymInt)]
    names: dict[Any, str] = {}
    for dim, node in symbolic:
        if node.expr.is_symbol:
            names.setdefault(node.expr, dim.name)
    texts = [f"{dim.name} == {size}" for dim, size in sizes if not isinstance(size, torch.SymInt)]
    for dim, node in symbolic:
        traced = _text(node.expr, names)
        if traced != dim.name:
            texts.append(f"{dim.name} == {traced}")
    if symbolic:
        environment = symbolic[0][1].shape_env
        for symbol, name in names.items():
            texts.extend(_range_texts(environment.var_to_range[symbol], graph.dims[name]))
        ranges = {
            symbol: ValueRanges(graph.dims[name].min, graph.dims[name].max)
            for symbol, name in names.items()
        }
        for expression in _asserted(environment):
            known = environment.replace(expression)
            if known.free_symbols <= set(names) and not bound_sympy(known, ranges).lower:
                texts.append(_text(known, names))
    return tuple(SizeCondition(text) for text in dict.fromkeys(texts))


def _asserted(environment: Any) -> Iterator[Any]:  # noqa: ANN401
    for asserted in environment.deferred_runtime_asserts.values():
        yield from (one.expr for one in asserted)
    yield from (guard.expr for guard in environment.guards)


def _range_texts(values: Any, dim: DynamicDim) -> Iterator[str]:  # noqa: ANN401
    # Integer, unlike torch's two infinities.
    if values.lower.is_Integer and int(values.lower) > dim.min:
        yield f"{dim.name} >= {int(values.lower)}"
    if values.upper.is_Integer and int(values.upper) < dim.max:
        yield f"{dim.name} <= {int(values.upper)}"


def _text(expression: Any, names: Mapping[Any, str]) -> str:  # noqa: ANN401
    named = {symbol: type(symbol)(name, integer=True) for symbol, name in names.items()}
    msg = f"the export assumes {expression} of sizes, which cannot be written as a condition"
    if not expression.free_symbols <= set(names):
        raise ValueError(msg)
    try:
        text = _Printer().doprint(expression.xreplace(named))
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(msg) from error
    # Without the printer's superfluous parentheses.
    return ast.unparse(ast.parse(str(text), mode="eval"))
