"""The flat module: tensors in, tensors out, whatever the module's own calling form."""

from __future__ import annotations

from torch import Tensor, nn

from aitune_core._calls import CallForm
from aitune_core._trees import flatten
from aitune_core.specs import GraphSpec

__all__ = ["FlatModule"]


class FlatModule(nn.Module):
    """A module whose ``forward`` takes the flat inputs of a graph and returns its flat outputs.

    Inputs are cloned inside, so that outputs which are inputs, inputs which are one tensor twice
    and in-place changes all stay apart.
    """

    def __init__(self, module: nn.Module, call_form: CallForm, graph: GraphSpec) -> None:
        super().__init__()
        self.module = module
        self._call_form = call_form
        self._graph = graph
        # Set here and not through eval(): the flags of the module's parts are the user's.
        self.training = False

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the module on flat inputs, in graph order; returns its flat outputs."""
        own = [tensor.clone() for tensor in inputs]
        args, kwargs = self._call_form.arguments(self._graph.call_structure, own)
        # Not __call__: the hooks of the outermost module run around every call, tuned or not.
        result = self.module.forward(*args, **kwargs)
        leaves: list[Tensor] = []
        flatten(result, leaves, "out")
        return (*leaves, *(own[index] for index in self._graph.mutated_inputs))

