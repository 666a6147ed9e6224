"""Dispatch: the tuned graph for a call, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from aitune_core._calls import CallForm
from aitune_core._plans import Facts, Plan, Taker, builder, facts_of, taker
from aitune_core._scalars import CallStructure, family, lift, number_places, scalar_tensor
from aitune_core._tensors import plain_tensor, share_memory
from aitune_core._trees import (
    HOLE,
    SCALAR_HOLE,
    Structure,
    TreeError,
    hole_paths,
    leaf_paths,
    unflatten,
)
from aitune_core.backend import Backend, Engine
from aitune_core.errors import InputMismatchError
from aitune_core.specs import GraphSpec

__all__ = ["Dispatcher", "Miss", "TunedGraph"]

#: Accepted calls remembered before the memory starts anew.
_MAX_REMEMBERED: Final = 4096
#: Plans per way of writing a call.
_MAX_PLANS: Final = 8
_PLAIN_TYPES: Final = frozenset({Tensor, nn.Parameter})
_Writing: TypeAlias = tuple[Any, ...]
_Known: TypeAlias = "tuple[CallStructure, Plan, dict[Facts, TunedGraph | InputMismatchError]]"


class Miss(Exception):  # noqa: N818 - control flow, not an error
    """A call that no tuned graph takes.

    Attributes:
        reason: What stands in the way; None where the call must run eagerly without a word,
            because it is being traced or exported.
    """

    def __init__(self, reason: InputMismatchError | None) -> None:
        super().__init__(str(reason))
        self.reason = reason


class TunedGraph:
    """An engine with everything that its calls need, computed once.

    Args:
        backend: The backend that made the engine.
        engine: The engine.
    """

    def __init__(self, backend: Backend, engine: Engine) -> None:
        graph = engine.graph
        self.backend = backend
        self.graph: GraphSpec = graph
        self.engine = engine
        self._run = engine.run
        self.mutated = graph.mutated_inputs
        self._count = graph.result_count
        self._single = graph.result_structure == HOLE and not graph.mutated_inputs
        self._build = builder(graph.result_structure)
        self._complex = any(spec.dtype.is_complex for spec in graph.inputs)
        self.shape_facts = tuple((spec.dtype, spec.rank, spec.device_type) for spec in graph.inputs)

    def call(self, inputs: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """Run the engine and return the module's result."""
        return self.result(inputs, self.run(inputs))

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the engine, which changes nothing of the inputs, and return what it gives."""
        if any(map(Tensor.is_neg, inputs)) or (self._complex and any(map(torch.is_conj, inputs))):
            # Signs that are not in memory yet; engines read memory.
            inputs = [tensor.resolve_conj().resolve_neg() for tensor in inputs]
        return self._run(inputs)

    def result(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """Return the module's result, after the changes of inputs that it makes in place."""
        if self._single:
            return outputs[0]
        if self.mutated:
            with torch.no_grad():
                for index, changed in zip(self.mutated, outputs[self._count :], strict=True):
                    inputs[index].copy_(changed)
        return self._build(iter(outputs))


class Dispatcher:
    """The tuned graphs of one module. Never changes, so that threads need no lock.

    Args:
        call_form: Signature of the module.
        graphs: At least one, all on one device.
    """

    def __init__(self, call_form: CallForm, graphs: Sequence[TunedGraph]) -> None:
        self.call_form = call_form
        self.graphs = tuple(graphs)
        self.device = graphs[0].engine.device
        self._by_form: dict[CallStructure, list[TunedGraph]] = {}
        #: Forms in which numbers are inputs, by the form in which all numbers are.
        self._families: dict[CallStructure, list[CallStructure]] = {}
        for graph in self.graphs:
            form = graph.graph.call_structure
            self._by_form.setdefault(form, []).append(graph)
            if number_places(form):
                self._families.setdefault(family(form), []).append(form)
        self._remembered: dict[tuple[CallStructure, Facts], TunedGraph] = {}
        #: By the way in which a call is written: number of positions, and keywords.
        self._plans: dict[_Writing, tuple[_Known, ...]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Element type in which the module computes: the first one that has fractions."""
        for graph in self.graphs:
            for spec in (*graph.graph.inputs, *graph.graph.outputs):
                if spec.dtype.is_floating_point:
                    return spec.dtype
        return torch.get_default_dtype()

    def find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[TunedGraph, list[Tensor]]:
        """Return the graph for a call and its flat inputs.

        Raises:
            CallFormError: The call does not fit the signature.
            Miss: No graph takes it.
        """
        writing = (len(args), *kwargs)
        for _, plan, known in self._plans.get(writing, ()):
            leaves = plan.leaves(args, kwargs)
            if leaves is not None:
                found = known.get(facts_of(leaves))
                if isinstance(found, TunedGraph):
                    self._check_call(found, leaves)
                    return found, leaves
                if found is not None:
                    raise Miss(found)
                break
        structure, leaves = self._taken_apart(args, kwargs)
        try:
            graph = self._looked_up(structure, leaves)
        except Miss as miss:
            if miss.reason is not None:
                self._remember(writing, structure, leaves, miss.reason)
            raise
        self._remember(writing, structure, leaves, graph)
        self._check_call(graph, leaves)
        return graph, leaves

    def _taken_apart(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[CallStructure, list[Tensor]]:
        """Return structure and tensors of a call, the general way."""
        leaves: list[Tensor] = []
        try:
            structure = self.call_form.structure(self.call_form.bind(args, kwargs), leaves)
        except TreeError as error:
            msg = f"argument {error.path!r} fits no tuned graph: {error.reason}"
            raise Miss(InputMismatchError(msg, path=error.path, got=error.reason)) from None
        grad = torch.is_grad_enabled()
        for position, leaf in enumerate(leaves):
            if (
                type(leaf) not in _PLAIN_TYPES
                or leaf.layout is not torch.strided
                or (grad and leaf.requires_grad)
            ):
                self._check_leaf(position, leaf, structure, grad=grad)
        if self._families and structure not in self._by_form:
            return self._with_inputs_for_numbers(structure, leaves)
        return structure, leaves

    def _looked_up(self, structure: CallStructure, leaves: list[Tensor]) -> TunedGraph:
        key = (structure, facts_of(leaves))
        graph = self._remembered.get(key)
        if graph is None:
            graph = self._find_slowly(structure, leaves)
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = graph
        return graph

    def _remember(
        self,
        writing: _Writing,
        structure: CallStructure,
        leaves: list[Tensor],
        found: TunedGraph | InputMismatchError,
    ) -> None:
        """Note what was found for calls that are written like this one, where there can be a plan.

        Args:
            writing: How the call is written.
            structure: Its structure.
            leaves: Its tensors.
            found: Its graph, or why there is none.
        """
        facts = facts_of(leaves)
        plans = self._plans.get(writing, ())
        for other, _, known in plans:
            if other == structure:
                if len(known) >= _MAX_REMEMBERED:
                    known.clear()
                known[facts] = found
                return
        if len(plans) >= _MAX_PLANS:
            return
        given, *names = writing
        takers: list[tuple[int | str, Taker]] = []
        for place, child in self.call_form.written(structure, int(given), names):
            take = taker(child)
            if take is None:
                return
            takers.append((place, take))
        self._plans[writing] = (*plans, (structure, Plan(takers), {facts: found}))

    def _check_call(self, graph: TunedGraph, leaves: list[Tensor]) -> None:
        """Check what may differ between calls that are otherwise alike."""
        if graph.mutated and share_memory(leaves, graph.mutated):
            msg = "forward changes an input in place that shares memory with another input"
            raise Miss(InputMismatchError(msg, expected="separate memory", got="shared memory"))
        if torch.is_autocast_enabled(self.device.type):
            msg = (
                "the call is under torch.autocast, the module was tuned without; "
                "cast the module instead"
            )
            raise Miss(InputMismatchError(msg, path="autocast", expected=False, got=True))

    def _with_inputs_for_numbers(
        self, structure: CallStructure, leaves: list[Tensor]
    ) -> tuple[CallStructure, list[Tensor]]:
        for form in self._families.get(family(structure), ()):
            lifted, mixed = lift(structure, leaves, number_places(form))
            if lifted == form:
                return lifted, [
                    leaf if isinstance(leaf, Tensor) else scalar_tensor(leaf, self.device)
                    for leaf in mixed
                ]
        return structure, leaves

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call on its graph. Raises as `find`."""
        graph, inputs = self.find(args, kwargs)
        return graph.call(inputs)

    def _check_leaf(
        self, position: int, leaf: Tensor, structure: CallStructure, *, grad: bool
    ) -> None:
        path = self.call_form.leaf_paths(structure)[position]
        if not plain_tensor(leaf):
            traced = type(leaf).__module__.startswith("torch._subclasses")
            msg = (
                f"input {path!r} is a {type(leaf).__name__} with layout {leaf.layout} on "
                f"{leaf.device}; tuned graphs take plain dense tensors"
            )
            raise Miss(None if traced else InputMismatchError(msg, path=path, got=type(leaf)))
        if grad and leaf.requires_grad:
            msg = (
                f"input {path!r} requires grad and tuned graphs compute no gradients; call under "
                "torch.no_grad() or detach it"
            )
            raise Miss(InputMismatchError(msg, path=path, expected="no grad", got="requires grad"))

    def _find_slowly(self, structure: CallStructure, leaves: Sequence[Tensor]) -> TunedGraph:
        candidates = self._by_form.get(structure)
        if candidates is None:
            raise Miss(self._form_mismatch(structure))
        reasons = []
        for graph in candidates:
            try:
                graph.graph.check_inputs(leaves)
                self._check_devices(graph.graph, leaves)
            except InputMismatchError as error:
                reasons.append((self._closeness(graph, leaves), error))
            else:
                return graph
        raise Miss(max(reasons, key=lambda pair: pair[0])[1])

    @staticmethod
    def _closeness(graph: TunedGraph, leaves: Sequence[Tensor]) -> int:
        """Number of inputs that agree, so that the error speaks of the nearest graph."""
        return sum(
            fact == (leaf.dtype, leaf.dim(), leaf.device.type)
            for fact, leaf in zip(graph.shape_facts, leaves, strict=True)
        )

    def _check_devices(self, graph: GraphSpec, leaves: Sequence[Tensor]) -> None:
        for spec, leaf in zip(graph.inputs, leaves, strict=True):
            if spec.device_type == self.device.type and leaf.device != self.device:
                msg = (
                    f"input {spec.path!r} is on {leaf.device}, the module was tuned on "
                    f"{self.device}"
                )
                raise InputMismatchError(
                    msg, path=spec.path, expected=str(self.device), got=str(leaf.device)
                )

    def _values_at(self, position: int, form: CallStructure) -> list[str]:
        """Return what forms that are otherwise equal have in one place."""
        return [
            _describe(other[position])
            for other in self._by_form
            if all(
                one == two
                for place, (one, two) in enumerate(zip(form, other, strict=True))
                if place != position
            )
        ]

    def _form_mismatch(self, structure: CallStructure) -> InputMismatchError:
        """Say which argument differs from the nearest tuned calling form."""
        nearest = max(
            self._by_form,
            key=lambda form: sum(a == b for a, b in zip(form, structure, strict=True)),
        )
        for position, (expected, got) in enumerate(zip(nearest, structure, strict=True)):
            if expected != got:
                path, wanted, found = _first_difference(
                    self.call_form.parameters[position].name, expected, got
                )
                advice = "record such a call to tune for it"
                if _both_numbers(expected, got):
                    values = self._values_at(position, nearest)
                    wanted = " or ".join(values)
                    if len(values) == 1:
                        advice = "record calls with several values of it, so that it is an input"
                msg = (
                    f"argument {path!r} is {found}, the nearest tuned graph takes {wanted}; "
                    f"{advice}"
                )
                return InputMismatchError(msg, path=path, expected=wanted, got=found)
        msg = "the call differs from every tuned graph"  # unreachable unless forms are equal
        return InputMismatchError(msg)


def _first_difference(path: str, expected: Structure, got: Structure) -> tuple[str, str, str]:
    """Return path and words for the first place at which two structures differ."""
    wanted, found = list(leaf_paths(expected, path)), list(leaf_paths(got, path))
    if [name for name, _ in wanted] == [name for name, _ in found]:
        for (name, one), (_, other) in zip(wanted, found, strict=True):
            if one != other:
                return name, _describe(one), _describe(other)
    paths = ({name for name, _ in wanted}, {name for name, _ in found})
    words = (_describe(expected), _describe(got))
    if words[0] == words[1]:
        surplus, missing = sorted(paths[1] - paths[0]), sorted(paths[0] - paths[1])
        order = "" if surplus or missing else " in another order"
        words = (
            f"{words[0]} with {missing or 'them'}",
            f"{words[1]}{order} with {surplus or 'them'}",
        )
    return path, *words


def _both_numbers(*structures: Structure) -> bool:
    """Whether two structures are numbers by value, of one type."""
    if any(structure[0] != "=" for structure in structures):
        return False
    one, other = (unflatten(structure, iter(())) for structure in structures)
    return type(one) is type(other) and type(one) in {int, float}


def _describe(structure: Structure) -> str:
    if structure is HOLE:
        return "a tensor"
    if structure[0] == SCALAR_HOLE:
        return f"any {structure[1].__name__}"
    if structure[0] == "=":
        return repr(unflatten(structure, iter(())))
    kind = structure[0] if isinstance(structure[1], tuple) else structure[1].__name__
    count = len(hole_paths(structure))
    tensors = "1 tensor" if count == 1 else f"{count} tensors"
    return f"a {kind} of {len(structure[-1])} with {tensors}"
