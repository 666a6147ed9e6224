"""The numeric check: an engine's outputs against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from aitune_core._comparison import Difference, compare
from aitune_core._limits import needed_conditions
from aitune_core._ownership import check_ownership
from aitune_core._precision import full_float32
from aitune_core._reference import Case, Reference, described
from aitune_core._tensors import same_bits
from aitune_core._tolerances import Tolerance, derived_tolerance, given_tolerance
from aitune_core.backend import Assumptions, Engine
from aitune_core.conditions import SizeCondition
from aitune_core.errors import ValidationError
from aitune_core.results import CheckResult
from aitune_core.specs import GraphSpec

__all__ = ["EngineCheck"]

#: Units in the last place of 1 that saturated values may be off by where nothing was recorded.
_SATURATED = 8


class EngineCheck:
    """Compares engines of one graph with the eager module.

    Args:
        graph: The graph.
        samples: Recorded flat inputs.
        reference: The eager module on them and on others.
        declared: Names of the dims whose ranges the user gave; engines must take their ends.
        tolerance: Relative errors that the user allows, instead of those derived.
    """

    def __init__(
        self,
        graph: GraphSpec,
        samples: Sequence[tuple[Tensor, ...]],
        reference: Reference,
        declared: frozenset[str] = frozenset(),
        tolerance: Tolerance | None = None,
    ) -> None:
        self._graph = graph
        self._samples = samples
        self._reference = reference
        self._declared = declared
        self._tolerance = tolerance

    def __call__(self, engine: Engine) -> CheckResult:
        """Compare an engine with the reference on every case.

        Raises:
            ValidationError: An output differs; the error names it, the worst difference and its
                place. Or results are not the caller's: see `check_ownership`.
            RecordingError: Eager itself is not repeatable.
        """
        cases = self._reference.cases()
        self._check_declared(engine.graph)
        worst = Difference(0.0, 0.0, self._graph.outputs[0].path if self._graph.outputs else "")
        absolute = eager_error = 0.0
        most = (0.0, 0.0)
        outside: list[str] = []
        compared: list[Case] = []
        for case in cases:
            if case.sizes is None:
                self._check_recorded(engine.graph, case)
            broken = case.sizes and engine.graph.broken_condition(case.sizes)
            if broken:
                outside.append(f"{case.label}: the engine takes sizes with {broken}")
                continue
            if case.extreme and engine.compute_dtype is not None:
                outside.append(f"{case.label}: the engine computes in {engine.compute_dtype}")
                continue
            compared.append(case)
            for difference in self._differences(engine, case):
                absolute = max(absolute, difference.absolute)
                if difference.share >= worst.share:
                    worst = difference
                if case.recorded:
                    most = max(most, (difference.error, difference.allowed))
            if case.recorded and case.correction is not None:
                eager_error = max(eager_error, *case.correction.errors, 0.0)
        check_ownership(engine, self._graph, compared, self._reference.module, self._differences)
        return CheckResult(
            cases=len(compared),
            worst_difference=absolute,
            worst_output=worst.output,
            worst_case=worst.case,
            worst_index=worst.index,
            tolerance_share=worst.share,
            error=most[0],
            allowed_error=most[1],
            eager_error=eager_error,
            reference=self._reference.name,
            skipped=(*self._reference.skipped, *outside),
        )

    def _check_recorded(self, graph: GraphSpec, case: Case) -> None:
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
            return self._reference.resized(sizes)

        def agrees(sizes: Mapping[str, int]) -> bool | None:
            inputs = inputs_at(sizes)
            try:
                reference = self._reference.eager(inputs)
            except ValidationError:
                return False
            except Exception:  # noqa: BLE001 - of the user's module, of any kind
                return None
            try:
                case = Case(f"sizes ({described(sizes)})", inputs, reference, sizes)
                list(self._differences(engine, case))
            except ValidationError:
                return False
            return True

        follow = None if assumed is None else lambda sizes: assumed(inputs_at(sizes))
        recorded = [self._graph.dim_sizes(sample) for sample in self._samples]
        return needed_conditions(self._graph, conditions, agrees, follow, recorded)

    def _differences(self, engine: Engine, case: Case) -> Iterator[Difference]:
        if isinstance(case.reference, ValidationError):
            error = case.reference
            msg = f"{error}, on {case.label}"
            raise ValidationError(
                msg,
                output=error.output,
                kind=error.kind,
                expected=error.expected,
                got=error.got,
                case=case.label,
            ) from error
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
        yield from self._compared(case, case.reference, outputs, engine.compute_dtype)

    def _compared(
        self,
        case: Case,
        reference: Sequence[Tensor],
        outputs: Sequence[Tensor],
        computes: torch.dtype | None,
    ) -> Sequence[Difference]:
        """Compare with the reference; where that fails, also with what else eager may give.

        That is, where it used TF32, what it gives in full float32; and at values that were not
        recorded, what it gives for inputs that differ by rounding errors.
        """
        shares = self._shares(case, reference, computes)
        lacking = [None] * len(reference) if case.correction is None else case.correction.tensors
        try:
            return self._compared_with(reference, lacking, case, outputs, shares)
        except ValidationError as error:
            if error.kind != "values":
                raise
            if case.extreme:
                moved = self._reference.sensitivity(case.inputs)
                shares = [max(share, more) for share, more in zip(shares, moved, strict=True)]
            elif not any(tensor.is_cuda for tensor in case.inputs):
                raise
            with full_float32() as changed:
                if changed:
                    reference = self._reference.eager(case.inputs)
                    lacking = [None] * len(reference)
                elif not case.extreme:
                    raise
            return self._compared_with(reference, lacking, case, outputs, shares)

    def _shares(
        self, case: Case, reference: Sequence[Tensor], computes: torch.dtype | None
    ) -> list[float]:
        """Return the allowed relative error of each output."""
        errors: Sequence[float | None] = (
            [None] * len(reference) if case.correction is None else case.correction.errors
        )
        derived = [
            derived_tolerance(
                expected.dtype,
                expected.device,
                computes=computes,
                own=self._reference.own,
                eager_error=error,
                recorded=not case.extreme,
            )
            for expected, error in zip(reference, errors, strict=True)
        ]
        given = [given_tolerance(self._tolerance, spec.path) for spec in self._graph.outputs]
        return [more if less is None else less for more, less in zip(derived, given, strict=True)]

    def _compared_with(
        self,
        reference: Sequence[Tensor],
        lacking: Sequence[Tensor | None],
        case: Case,
        outputs: Sequence[Tensor],
        shares: Sequence[float],
    ) -> Sequence[Difference]:
        together = zip(self._graph.outputs, reference, lacking, outputs, shares, strict=True)
        return [
            compare(
                spec,
                expected,
                got,
                case.label,
                share=share,
                floor=0.0 if case.scale is None else _saturated(expected, case.scale),
                lacking=missing,
            )
            for spec, expected, missing, got, share in together
            if share < math.inf
        ]


def _saturated(expected: Tensor, scale: float) -> float:
    """Return how far values may be off of functions that saturate at 1, such as a sigmoid.

    What multiplies them by inputs, as ``silu`` does, multiplies the rounding of a 1, too.
    """
    real = expected.is_floating_point() or expected.is_complex()
    return max(_SATURATED, scale) * torch.finfo(expected.dtype).eps if real else 0.0
