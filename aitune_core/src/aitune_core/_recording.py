"""Recording: the calls that reach a wrapped module, and the graphs that they form."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from aitune_core._calls import CallForm
from aitune_core._scalars import family, lift, numbers_of, scalar_tensor
from aitune_core._state import StateWatch
from aitune_core._tensors import computable, plain_tensor, same_bits, share_memory, version_of
from aitune_core._trees import (
    HOLE,
    Structure,
    TreeError,
    flatten,
    hole_paths,
    leaf_paths,
    unflatten,
)
from aitune_core.errors import RecordingError

__all__ = [
    "GraphKey",
    "ModuleRecording",
    "RecordedCall",
    "RecordedGroup",
    "plain_tensor",
    "same_bits",
]

GraphKey: TypeAlias = tuple[tuple[Structure, ...], tuple[tuple[torch.dtype, int, str], ...]]


@attrs.frozen
class RecordedCall:
    """One call of a module.

    Attributes:
        call_structure: Structure of the bound arguments.
        inputs: Copies of its tensors, made before the call.
        result_structure: Structure of the result.
        output_shapes: Shape of each result tensor.
        output_dtypes: Element type of each result tensor.
        output_devices: Kind of device of each result tensor.
        mutated_inputs: Indices of the inputs that the call changed.
        outputs: Copies of the result's tensors.
    """

    call_structure: tuple[Structure, ...]
    inputs: tuple[Tensor, ...]
    result_structure: Structure
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[torch.dtype, ...]
    output_devices: tuple[str, ...]
    mutated_inputs: frozenset[int]
    outputs: tuple[Tensor, ...]

    @property
    def key(self) -> GraphKey:
        """What calls of one graph have in common."""
        return (self.call_structure, self._facts)

    @property
    def family(self) -> GraphKey:
        """What calls have in common that differ in tensors and in the values of numbers."""
        return (family(self.call_structure), self._facts)

    @property
    def result_form(self) -> tuple[Structure, tuple[tuple[torch.dtype, str, int], ...]]:
        """What results of one graph have in common."""
        ranks = map(len, self.output_shapes)
        facts = zip(self.output_dtypes, self.output_devices, ranks, strict=True)
        return (self.result_structure, tuple(facts))

    @property
    def _facts(self) -> tuple[tuple[torch.dtype, int, str], ...]:
        return tuple((tensor.dtype, tensor.dim(), tensor.device.type) for tensor in self.inputs)


@attrs.frozen
class RecordedGroup:
    """The calls of one graph.

    Attributes:
        calls: The calls; numbers that changed between them are inputs.
        by_value: The same calls with numbers by value, one sequence per combination of values;
            empty where no number changed.
    """

    calls: tuple[RecordedCall, ...]
    by_value: tuple[tuple[RecordedCall, ...], ...] = ()


class ModuleRecording:
    """The calls that reached one module during one tuning."""

    def __init__(self, name: str, module: nn.Module, call_form: CallForm) -> None:
        self.name = name
        self.module = module
        self.call_form = call_form
        self.calls: list[RecordedCall] = []
        #: Why the module cannot be tuned, found at its first call that shows it.
        self.problem: RecordingError | None = None

    def record(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run the module eagerly, note the call, and return the module's result."""
        if self.problem is not None:
            return self.module.forward(*args, **kwargs)
        try:
            call_structure, leaves = self._flatten_call(args, kwargs)
        except TreeError as error:
            self._refuse(f"argument {error.path!r} cannot be recorded: {error.reason}", error.path)
            return self.module.forward(*args, **kwargs)
        copies = _copies(leaves)
        state = StateWatch(self.module)
        versions = [version_of(leaf) for leaf in leaves]
        result = self.module.forward(*args, **kwargs)
        lost = self._changed_state(state, call_structure, copies) or self._changed_argument(
            args, kwargs, call_structure, leaves
        )
        if lost is not None:
            self._refuse(*lost)
            return result
        mutated = frozenset(
            index
            for index, (leaf, copy) in enumerate(zip(leaves, copies, strict=True))
            if version_of(leaf) != versions[index] or not same_bits(leaf, copy)
        )
        if share_memory(leaves, mutated):
            self._refuse("forward changes an input in place that shares memory with another input")
            return result
        outputs: list[Tensor] = []
        try:
            result_structure = flatten(result, outputs, "out")
        except TreeError as error:
            self._refuse(f"result {error.path!r} cannot be recorded: {error.reason}", error.path)
            return result
        self.calls.append(
            RecordedCall(
                call_structure=call_structure,
                inputs=copies,
                result_structure=result_structure,
                output_shapes=tuple(tuple(output.shape) for output in outputs),
                output_dtypes=tuple(output.dtype for output in outputs),
                output_devices=tuple(output.device.type for output in outputs),
                mutated_inputs=mutated,
                outputs=_copies(outputs),
            )
        )
        return result

    def _flatten_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Structure, ...], list[Tensor]]:
        leaves: list[Tensor] = []
        structure = self.call_form.structure(self.call_form.bind(args, kwargs), leaves)
        for path, leaf in zip(self.call_form.leaf_paths(structure), leaves, strict=True):
            if not plain_tensor(leaf):
                reason = (
                    f"{type(leaf).__name__} with layout {leaf.layout} on {leaf.device} is not a "
                    "plain dense tensor"
                )
                raise TreeError(reason, path)
            if torch.is_autocast_enabled(leaf.device.type):
                reason = "the call is under torch.autocast; cast the module instead"
                raise TreeError(reason, path)
        return structure, leaves

    def _changed_state(
        self, state: StateWatch, structure: tuple[Structure, ...], copies: Sequence[Tensor]
    ) -> tuple[str, str] | None:
        """Return why a call that changed tensors of the module is refused, and which one."""
        name = state.written()
        if name is None and state.replaced() is not None:
            name = self._changed_again(structure, copies)
        if name is None:
            return None
        reason = (
            f"forward changes its own state {name!r} on each call, which an engine would "
            "lose; make it an input and an output"
        )
        return reason, name

    def _changed_again(
        self, structure: tuple[Structure, ...], copies: Sequence[Tensor]
    ) -> str | None:
        """Return which tensor another call of this kind changes.

        What is made once, on a first call or for a longer input, is no state; nor is what is made
        on each call, and is the same for other values.
        """
        for inputs, by_equal in (([*map(_other_values, copies)], False), (_copies(copies), True)):
            again = StateWatch(self.module)
            args, kwargs = self.call_form.arguments(structure, inputs)
            try:
                self.module.forward(*args, **kwargs)
            except Exception:  # noqa: BLE001, S112 - of the user's module, for values of no sense
                continue
            return again.written() or again.replaced(by_equal=by_equal)
        return None

    def _changed_argument(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        structure: tuple[Structure, ...],
        leaves: Sequence[Tensor],
    ) -> tuple[str, str] | None:
        """Return why a call that put something into an argument, or took it out, is refused."""
        given = iter(leaves)
        values = self.call_form.bind(args, kwargs)
        for parameter, value, before in zip(
            self.call_form.parameters, values, structure, strict=True
        ):
            found: list[Tensor] = []
            try:
                after = flatten(value, found)
            except TreeError:
                after = None
            own = list(itertools.islice(given, len(hole_paths(before))))
            if after != before or any(a is not b for a, b in zip(found, own, strict=True)):
                reason = (
                    f"forward changes argument {parameter.name!r} itself, not only tensors in it, "
                    "which an engine would not do; let it change a copy, or return what is new"
                )
                return reason, parameter.name
        return None

    def _refuse(self, reason: str, path: str | None = None) -> None:
        msg = f"module {self.name!r} cannot be tuned: {reason}"
        self.problem = RecordingError(msg, module_name=self.name, path=path)
        self.calls.clear()

    def groups(self) -> list[RecordedGroup]:
        """Return the calls of each graph, in order of first appearance.

        Calls that differ in the values of numbers alone form one graph, in which the numbers that
        changed are inputs.

        Raises:
            RecordingError: Calls of one graph return different structures.
        """
        families: dict[GraphKey, list[RecordedCall]] = {}
        for call in self.calls:
            families.setdefault(call.family, []).append(call)
        groups = []
        for calls in families.values():
            exact: dict[GraphKey, list[RecordedCall]] = {}
            for call in calls:
                exact.setdefault(call.key, []).append(call)
            for same in exact.values():
                self._check_results(same)
            by_value = tuple(map(tuple, exact.values()))
            if len(exact) > 1 and len({call.result_form for call in calls}) == 1:
                groups.append(RecordedGroup(tuple(_with_inputs_for_numbers(calls)), by_value))
            else:
                groups.extend(map(RecordedGroup, by_value))
        return groups

    def _check_results(self, calls: Sequence[RecordedCall]) -> None:
        first = calls[0]
        for call in calls:
            if call.result_form != first.result_form:
                path, what = _difference(first, call)
                msg = (
                    f"module {self.name!r} cannot be tuned: calls of one form return results of "
                    f"different forms: {path!r} is {what}; return a tensor for what changes from "
                    "call to call"
                )
                raise RecordingError(msg, module_name=self.name, path=path)


def _difference(one: RecordedCall, other: RecordedCall) -> tuple[str, str]:
    """Return where the forms of two results part, and what is there in each."""
    parts, others = _result_parts(one), _result_parts(other)
    for path in {**parts, **others}:
        if parts.get(path) != others.get(path):
            return path, f"{parts.get(path, 'missing')}, then {others.get(path, 'missing')}"
    return "out", "of one container, then of another"


def _result_parts(call: RecordedCall) -> dict[str, str]:
    """Return a description of every leaf of a result by its path."""
    _, facts = call.result_form
    tensors = (
        f"a tensor of {dtype} and {rank} dims on {device}".replace("torch.", "")
        for dtype, device, rank in facts
    )
    return {
        path: next(tensors) if leaf == HOLE else repr(unflatten(leaf, iter(())))
        for path, leaf in leaf_paths(call.result_structure, "out")
    }


def _copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().resolve_conj().resolve_neg().clone() for tensor in tensors)


def _other_values(tensor: Tensor) -> Tensor:
    """Return other values of a kind; integers in another order, since they may be indices."""
    if tensor.dtype is torch.bool:
        return ~tensor
    if computable(tensor):
        return -tensor
    return tensor.flip(tuple(range(tensor.dim())))


def _with_inputs_for_numbers(calls: Sequence[RecordedCall]) -> Iterator[RecordedCall]:
    """Yield calls of one family with the numbers that differ between them turned into inputs."""
    columns = zip(*(numbers_of(call.call_structure) for call in calls), strict=True)
    changing = frozenset(
        place for place, values in enumerate(columns) if len({repr(value) for value in values}) > 1
    )
    for call in calls:
        device = call.inputs[0].device if call.inputs else torch.device("cpu")
        structure, leaves = lift(call.call_structure, call.inputs, changing)
        inputs = tuple(
            leaf if isinstance(leaf, Tensor) else scalar_tensor(leaf, device) for leaf in leaves
        )
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        yield attrs.evolve(
            call,
            call_structure=structure,
            inputs=inputs,
            mutated_inputs=frozenset(tensors[index] for index in call.mutated_inputs),
        )
