"""Conditions on dims out of what PyTorch found out about symbolic sizes while it traced.

Importing this takes a second; the core does so only where a backend needs it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from aitune_core.conditions import SizeCondition
from aitune_core.specs import DynamicDim, GraphSpec

__all__ = ["symbolic_conditions"]


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


def symbolic_conditions(inputs: Iterable[Tensor], graph: GraphSpec) -> tuple[SizeCondition, ...]:
    """Return what was found out about the symbolic sizes of a graph's inputs.

    Conditions that sizes in the ranges of the dims always meet may be among them.

    Args:
        inputs: The tensors without data that stood for the graph's inputs, in order.
        graph: The graph.

    Raises:
        ValueError: A condition cannot be written as a `SizeCondition`.
    """
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
