"""The flat module: tensors in, tensors out, whatever the module's own calling form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from aitune_core._calls import CallForm, Writing
from aitune_core._scalars import scalar_kinds
from aitune_core._trees import Structure, flatten, leaf_paths, unflatten
from aitune_core.errors import ValidationError
from aitune_core.specs import GraphSpec

__all__ = ["FlatModule"]


class FlatModule(nn.Module):
    """A module whose ``forward`` takes the flat inputs of a graph and returns its flat outputs.

    Inputs are cloned inside, so that outputs which are inputs, inputs which are one tensor twice
    and in-place changes all stay apart. What is not a tensor in the result is compared with the
    recorded calls: an exporter that runs this on symbolic sizes learns what it depends on.

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

    def around(self, module: nn.Module) -> FlatModule:
        """Return the same around another module of one signature and result."""
        other = FlatModule(module, self._call_form, self._graph)
        other._numbers = self._numbers
        return other

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the module on flat inputs, in graph order; returns its flat outputs.

        Raises:
            ValidationError: What is not a tensor in the result is not as recorded.
        """
        return self.run([tensor.clone() for tensor in inputs])

    def run(self, inputs: Sequence[Tensor], writing: Writing = "short") -> tuple[Tensor, ...]:
        """Run the module on these very tensors, which it may change. Raises as `forward`.

        Args:
            inputs: Flat inputs, in graph order.
            writing: How the call is written.
        """
        own: list[Any] = list(inputs)
        for index, kind in self._numbers.items():
            own[index] = kind(inputs[index].item())
        args, kwargs = self._call_form.arguments(self._graph.call_structure, own, writing)
        # Not __call__: the hooks of the outermost module run around every call, tuned or not.
        result = self.module.forward(*args, **kwargs)
        leaves: list[Tensor] = []
        structure = flatten(result, leaves, "out")
        if structure != self._graph.result_structure:
            raise _structure_error(self._graph.result_structure, structure)
        return (*leaves, *(own[index] for index in self._graph.mutated_inputs))


def _structure_error(recorded: Structure, got: Structure) -> ValidationError:
    """Say which part of a result is not as recorded."""
    pairs = itertools.zip_longest(leaf_paths(recorded, "out"), leaf_paths(got, "out"))
    path, wanted, found = "out", "its containers", "others"
    for one, other in pairs:
        if one != other:
            path = (one or other or ("out",))[0]
            wanted = _words(one[1]) if one is not None else "absent"
            found = _words(other[1]) if other is not None and other[0] == path else "absent"
            break
    msg = (
        f"what is not a tensor in the result changes: {path!r} is {wanted} in the recorded calls, "
        f"and {found} here; return a tensor for it, or tune for calls that leave it as it is"
    )
    return ValidationError(msg, output=path, kind="structure", expected=wanted, got=found)


def _words(leaf: Structure) -> str:
    return repr(unflatten(leaf, iter(()))) if leaf[0] == "=" else "a tensor"
