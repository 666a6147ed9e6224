"""The flat module: tensors in, tensors out, whatever the module's own calling form."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from aitune_core._calls import CallForm
from aitune_core._scalars import scalar_kinds
from aitune_core._trees import flatten
from aitune_core.specs import GraphSpec

__all__ = ["FlatModule"]


class FlatModule(nn.Module):
    """A module whose ``forward`` takes the flat inputs of a graph and returns its flat outputs.

    Inputs are cloned inside, so that outputs which are inputs, inputs which are one tensor twice
    and in-place changes all stay apart.

    Args:
        module: The module.
        call_form: Its signature.
        graph: The graph.
        numbers: Whether inputs that stand for Python numbers reach the module as such, which is
            what users call it with; an exporter needs them as tensors.
    """

    def __init__(
        self, module: nn.Module, call_form: CallForm, graph: GraphSpec, *, numbers: bool = False
    ) -> None:
        super().__init__()
        self._numbers = scalar_kinds(graph.call_structure) if numbers else {}
        self.module = module
        self._call_form = call_form
        self._graph = graph
        # Set here and not through eval(): the flags of the module's parts are the user's.
        self.training = False

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the module on flat inputs, in graph order; returns its flat outputs."""
        own: list[Any] = [tensor.clone() for tensor in inputs]
        for index, kind in self._numbers.items():
            own[index] = kind(inputs[index].item())
        args, kwargs = self._call_form.arguments(self._graph.call_structure, own)
        # Not __call__: the hooks of the outermost module run around every call, tuned or not.
        result = self.module.forward(*args, **kwargs)
        leaves: list[Tensor] = []
        flatten(result, leaves, "out")
        return (*leaves, *(own[index] for index in self._graph.mutated_inputs))
