"""Refusals: what cannot be tuned, said before an engine is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from aitune_core._calls import CallForm
from aitune_core._trees import array_problem
from aitune_core.errors import CallFormError, ConfigError, RecordingError
from aitune_core.specs import GraphSpec

__all__ = ["check_call", "check_graph", "check_initialised"]


def check_initialised(name: str, module: nn.Module) -> None:
    """Check that a module has all of its weights.

    Raises:
        RecordingError: A lazy module waits for its first call.
    """
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            msg = (
                f"module {name!r} cannot be tuned: {path!r} is a lazy parameter and has no values "
                "yet; run the module on one call first, then tune it"
            )
            raise RecordingError(msg, module_name=name, path=path)


def check_call(
    name: str, call_form: CallForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Check that what a call of a module gives in place of dense tensors is none of the known.

    Raises:
        ConfigError: An argument holds an array of NumPy, or a tensor that is not dense memory.
    """
    try:
        values = call_form.bind(args, kwargs)
    except CallFormError:
        return  # the call itself will say so
    for parameter, value in zip(call_form.parameters, values, strict=True):
        for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
            problem = _tensor_problem(leaf) if isinstance(leaf, Tensor) else array_problem(leaf)
            if problem is not None:
                path = f"{parameter.name}{pytree.keystr(keys)}"
                what, step = problem
                msg = f"input_data of module {name!r}: argument {path!r} is {what}; {step}"
                raise ConfigError(msg, field="input_data", value=path, allowed="dense tensors")


def _tensor_problem(tensor: Tensor) -> tuple[str, str] | None:
    """Return what is wrong with a tensor, and what to give instead."""
    if tensor.is_nested:
        return "a nested tensor", "give a padded one: torch.nested.to_padded_tensor"
    if tensor.is_meta:
        return "a meta tensor, which holds no values", "give one with values"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}", "give a dense one: to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor", "give one of floats: dequantize()"
    return None


def check_graph(name: str, graph: GraphSpec) -> None:
    """Check that a graph has tensors to give; an engine computes nothing else.

    Raises:
        RecordingError: It has none.
    """
    if not graph.outputs:
        msg = (
            f"module {name!r}, {graph.name}: the result holds no tensor and no input is changed in "
            "place, so that an engine would compute nothing; return tensors, or leave such calls "
            "out of input_data"
        )
        raise RecordingError(msg, module_name=name, path="out")
