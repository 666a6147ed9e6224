"""The numeric check: an engine's outputs against eager."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from aitune_core._comparison import TF32_TOLERANCE, Difference, compare
from aitune_core._flat import FlatModule
from aitune_core._limits import needed_conditions
from aitune_core._precision import full_float32, reduced_matmul
from aitune_core._synthesis import corner_sizes, resize_inputs, strided_copies
from aitune_core._tensors import same_bits
from aitune_core.backend import Assumptions, Engine
from aitune_core.conditions import SizeCondition
from aitune_core.errors import RecordingError, ValidationError
from aitune_core.specs import GraphSpec
from aitune_core.strategy import CheckResult

__all__ = ["EngineCheck"]


@attrs.frozen
class _Case:
    label: str
    inputs: tuple[Tensor, ...]
    reference: tuple[Tensor, ...]
    sizes: Mapping[str, int] | None = None
    strided: bool = False

    def fresh_inputs(self) -> tuple[Tensor, ...]:
        """Copies, so that an engine that writes into its inputs spoils nothing."""
        if self.strided:
            return strided_copies(self.inputs)
        return tuple(tensor.clone() for tensor in self.inputs)


class EngineCheck:
    """Compares engines of one graph with the eager module.

    The reference is computed once and used for every candidate: on each recorded call, at the
    minimum, maximum and interior sizes of the dims, and on inputs that are not contiguous.

    Args:
        graph: The graph.
        samples: Recorded flat inputs.
        flat_module: The eager module on flat tensors.
        module_name: Name used in errors.
        declared: Names of the dims whose ranges the user gave; engines must take their ends.
    """

    def __init__(
        self,
        graph: GraphSpec,
        samples: Sequence[tuple[Tensor, ...]],
        flat_module: FlatModule,
        module_name: str,
        declared: frozenset[str] = frozenset(),
    ) -> None:
        self._graph = graph
        self._samples = samples
        self._flat_module = flat_module
        self._module_name = module_name
        self._declared = declared
        self._skipped: list[str] = []
        self._cases: tuple[_Case, ...] | None = None

    def _eager(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            outputs: tuple[Tensor, ...] = self._flat_module(*inputs)
        return outputs

    def prepare(self) -> None:
        """Compute the reference.

        Raises:
            RecordingError: Eager itself gives other values for the same inputs.
        """
        if self._cases is None:
            self._check_repeatable()
            self._cases = tuple(self._make_cases())

    def _check_repeatable(self) -> None:
        inputs = self._samples[0]
        first, second = self._eager(inputs), self._eager(inputs)
        for spec, expected, got in zip(self._graph.outputs, first, second, strict=True):
            try:
                compare(spec, expected, got, "the same call twice")
            except ValidationError as error:
                msg = (
                    f"module {self._module_name!r} cannot be tuned: eager gives different results "
                    f"for the same inputs at {spec.path!r} (random numbers, or state)"
                )
                raise RecordingError(msg, module_name=self._module_name, path=spec.path) from error

    def _make_cases(self) -> Iterator[_Case]:
        for position, inputs in enumerate(self._samples):
            yield _Case(f"recorded call {position}", inputs, self._eager(inputs))
        first = self._samples[0]
        yield _Case("strided inputs", first, self._eager(first), strided=True)
        for label, sizes in corner_sizes(self._graph).items():
            described = _described(sizes)
            inputs = resize_inputs(self._graph, self._samples, sizes)
            try:
                reference = self._eager(inputs)
            except Exception as error:  # noqa: BLE001 - the module may refuse sizes it was never given
                self._skipped.append(f"{label} sizes ({described}): eager raised {error!r:.200}")
                continue
            yield _Case(f"{label} sizes ({described})", inputs, reference, sizes)

    def __call__(self, engine: Engine) -> CheckResult:
        """Compare an engine with eager on every case.

        Raises:
            ValidationError: An output differs; the error names it, the worst difference and its
                place.
            RecordingError: Eager itself is not repeatable.
        """
        self.prepare()
        assert self._cases is not None  # noqa: S101 - set by prepare
        self._check_declared(engine.graph)
        worst = Difference(0.0, 0.0, self._graph.outputs[0].path if self._graph.outputs else "")
        outside: list[str] = []
        for case in self._cases:
            if case.sizes is None:
                self._check_recorded(engine.graph, case)
            broken = case.sizes and engine.graph.broken_condition(case.sizes)
            if broken:
                outside.append(f"{case.label}: the engine takes sizes with {broken}")
                continue
            for difference in self._differences(engine, case):
                if difference.share >= worst.share:
                    worst = attrs.evolve(
                        difference, absolute=max(worst.absolute, difference.absolute)
                    )
        return CheckResult(
            cases=len(self._cases) - len(outside),
            worst_difference=worst.absolute,
            worst_output=worst.output,
            tolerance_share=worst.share,
            skipped=(*self._skipped, *outside),
        )

    def _check_recorded(self, graph: GraphSpec, case: _Case) -> None:
        """Refuse limits that leave out a recorded call."""
        sizes = self._graph.dim_sizes(case.inputs)
        broken = graph.broken_condition(sizes)
        if broken is not None:
            got = " and ".join(f"{name} = {sizes[name]}" for name in sorted(broken.dims))
            msg = f"what was built takes sizes with {broken}, and {case.label} has {got}"
            raise ValidationError(msg, kind="sizes", expected=broken.text, got=got, case=case.label)

    def _check_declared(self, graph: GraphSpec) -> None:
        """Refuse limits that cut off an end of a range that the user asked for."""
        for name in sorted(self._declared & set(graph.dims)):
            dim = graph.dims[name]
            for condition in graph.conditions:
                if condition.dims == {name} and not all(
                    condition.holds({name: end}) for end in (dim.min, dim.max)
                ):
                    msg = (
                        f"the declared {dim} is not served whole: the engine takes sizes with "
                        f"{condition}; declare a range whose ends the module takes on one path"
                    )
                    raise ValidationError(
                        msg, kind="sizes", expected=str(dim), got=condition.text, case="ranges"
                    )

    def needed(
        self,
        engine: Engine,
        conditions: Sequence[SizeCondition],
        assumed: Assumptions | None = None,
    ) -> tuple[SizeCondition, ...]:
        """Return those conditions without which an engine differs from eager.

        Args:
            engine: An engine that takes all sizes in the ranges.
            conditions: Conditions under which it was built.
            assumed: What the module takes for granted of the sizes of inputs, as conditions.
        """

        def inputs_at(sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
            return resize_inputs(self._graph, self._samples, sizes)

        def agrees(sizes: Mapping[str, int]) -> bool | None:
            inputs = inputs_at(sizes)
            try:
                reference = self._eager(inputs)
            except Exception:  # noqa: BLE001 - of the user's module, of any kind
                return None
            try:
                case = _Case(f"sizes ({_described(sizes)})", inputs, reference, sizes)
                list(self._differences(engine, case))
            except ValidationError:
                return False
            return True

        follow = None if assumed is None else lambda sizes: assumed(inputs_at(sizes))
        recorded = [self._graph.dim_sizes(sample) for sample in self._samples]
        return needed_conditions(self._graph, conditions, agrees, follow, recorded)

    def _differences(self, engine: Engine, case: _Case) -> Iterator[Difference]:
        inputs = case.fresh_inputs()
        try:
            outputs = engine(inputs)
        except Exception as error:
            msg = f"the engine failed on {case.label}: {error}"
            raise ValidationError(msg, kind="execution", case=case.label) from error
        if len(outputs) != len(case.reference):
            msg = f"eager returns {len(case.reference)} tensors, the engine {len(outputs)}"
            raise ValidationError(
                msg, kind="count", expected=len(case.reference), got=len(outputs), case=case.label
            )
        for spec, tensor, given in zip(self._graph.inputs, inputs, case.inputs, strict=True):
            if not same_bits(tensor, given):
                msg = f"the engine wrote into input {spec.path!r} on {case.label}"
                raise ValidationError(msg, output=spec.path, kind="input", case=case.label)
        for spec, got in zip(self._graph.outputs, outputs, strict=True):
            if got.requires_grad:
                msg = f"output {spec.path!r} of the engine requires grad; engines compute none"
                raise ValidationError(msg, output=spec.path, kind="grad", case=case.label)
        yield from self._compared(case, outputs)

    def _compared(self, case: _Case, outputs: Sequence[Tensor]) -> Sequence[Difference]:
        """Compare with eager; where eager used TF32, also with eager in full float32."""
        try:
            return self._compared_with(case.reference, case, outputs)
        except ValidationError as error:
            if error.kind != "values" or not any(tensor.is_cuda for tensor in case.inputs):
                raise
            with full_float32() as changed:
                if not changed:
                    raise
                reference = self._eager(case.inputs)
            return self._compared_with(reference, case, outputs)

    def _compared_with(
        self, reference: Sequence[Tensor], case: _Case, outputs: Sequence[Tensor]
    ) -> Sequence[Difference]:
        return [
            compare(spec, expected, got, case.label, share=_share(expected))
            for spec, expected, got in zip(self._graph.outputs, reference, outputs, strict=True)
        ]


def _described(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _share(expected: Tensor) -> float | None:
    reduced = expected.dtype is torch.float32 and reduced_matmul(expected.device)
    return TF32_TOLERANCE if reduced else None
