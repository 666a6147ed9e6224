"""What exporters say when they refuse a module."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from aitune_backend_onnxruntime.errors import OnnxExportError
from aitune_core.specs import DynamicDim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aitune_backend_onnxruntime.export import ExportPlan
    from aitune_core.specs import GraphSpec

__all__ = ["depends_on_values", "export_error", "failed_in_translation"]

#: How much of an exporter's error goes into ours, in characters.
_DETAIL_LENGTH: Final = 600

#: Terminal colours in exporters' messages.
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

#: What torch.export says of a branch or a number that depends on values.
_DATA_DEPENDENT: Final = (
    "data-dependent",
    "reads values",
    "DataDependentOutput",
    "GuardOnDataDependent",
    "Dynamic control flow",
)


def depends_on_values(error: BaseException) -> bool:
    """Whether the dynamo exporter refused a module because its Python code looks at values."""
    return any(sign in str(one) for one in _chain(error) for sign in _DATA_DEPENDENT)


def failed_in_translation(error: BaseException) -> bool:
    """Whether a module was captured, and an operator in it then had no form in the opset."""
    names = {type(one).__name__ for one in _chain(error)}
    # The latter: there is no form in any opset.
    return "ConversionError" in names and "DispatchError" not in names


def export_error(plan: ExportPlan, graph: GraphSpec, error: Exception) -> OnnxExportError:
    """Return our error for one of an exporter, with the sizes that it names and a next step."""
    *_, root = _chain(error)
    text = " ".join(_COLOUR.sub("", str(root)).split())[:_DETAIL_LENGTH] or type(root).__name__
    refused = _refused_axes(str(root), graph)
    if refused:
        hint = (
            "declare these sizes with dynamic_shapes=DynamicDim(...) in the range that the module "
            "really takes, record calls of one size only, or use another backend"
        )
        fact = f"the module fixes {', '.join(refused)}; "
    else:
        hint = _hint(plan, error)
        fact = ""
    msg = f"{plan.step} (opset {plan.opset}) failed: {fact}{type(root).__name__}: {text}"
    return OnnxExportError(f"{msg}. Next: {hint}", exporter=plan.exporter, hint=hint)


def _hint(plan: ExportPlan, error: Exception) -> str:
    # The tracer has its turn after dynamo, unless the module looks at values.
    if depends_on_values(error):
        return (
            "choose with operators (torch.where) instead of Python code, or wrap a part of the "
            "module that does not look at values"
        )
    if plan.exporter == "dynamo":
        return "wrap a part of the module without what is named, or try another opset_version"
    return "try use_dynamo=True where that was not tried, or another opset_version"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _refused_axes(text: str, graph: GraphSpec) -> list[str]:
    """Name the axes that torch.export says it had to fix."""
    found: list[str] = []
    for number, axis in re.findall(r"\['\w+'\]\[(\d+)\]\.(?:shape|size\(\))\[(\d+)\]", text):
        if int(number) < len(graph.inputs):
            spec = graph.inputs[int(number)]
            dim = spec.shape[int(axis)] if int(axis) < spec.rank else None
            name = f" ({dim})" if isinstance(dim, DynamicDim) else ""
            found.append(f"axis {axis} of input {spec.path!r}{name}")
    return list(dict.fromkeys(found))
