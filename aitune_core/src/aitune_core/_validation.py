"""The numeric check: an engine's outputs against eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from aitune_core._flat import FlatModule
from aitune_core._synthesis import corner_sizes, resize_inputs, strided_copies
from aitune_core._tensors import same_bits
from aitune_core.backend import Engine
from aitune_core.errors import RecordingError, ValidationError
from aitune_core.specs import GraphSpec, TensorSpec, dtype_name
from aitune_core.strategy import CheckResult

__all__ = ["EngineCheck", "tolerance"]

#: Allowed difference as a share of ``|reference| + rms(reference)``, by reference dtype: about
#: 1,000 units in the last place for float32, 10 for half precision, whose reference is itself
#: off by some.
_TOLERANCES: Final = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}
_FLOAT8_TOLERANCE: Final = 0.25


def tolerance(dtype: torch.dtype) -> float:
    """Return the allowed relative difference for outputs of ``dtype``; 0 means equal."""
    if dtype.is_floating_point or dtype.is_complex:
        return _TOLERANCES.get(dtype, _FLOAT8_TOLERANCE)
    return 0.0


@attrs.frozen
class _Case:
    label: str
    inputs: tuple[Tensor, ...]
    reference: tuple[Tensor, ...]


@attrs.frozen
class _Difference:
    absolute: float
    share: float
    output: str


class EngineCheck:
    """Compares engines of one graph with the eager module.

    The reference is computed once and used for every candidate: on each recorded call, at the
    minimum, maximum and interior sizes of the dims, and on inputs that are not contiguous.

    Args:
        graph: The graph.
        samples: Recorded flat inputs.
        flat_module: The eager module on flat tensors.
        module_name: Name used in errors.
    """

    def __init__(
        self,
        graph: GraphSpec,
        samples: Sequence[tuple[Tensor, ...]],
        flat_module: FlatModule,
        module_name: str,
    ) -> None:
        self._graph = graph
        self._samples = samples
        self._flat_module = flat_module
        self._module_name = module_name
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
                _compare(spec, expected, got, "the same call twice")
            except ValidationError as error:
                msg = (
                    f"module {self._module_name!r} cannot be tuned: eager gives different results "
                    f"for the same inputs at {spec.path!r} (random numbers, or state)"
                )
                raise RecordingError(msg, module_name=self._module_name, path=spec.path) from error

    def _make_cases(self) -> Iterator[_Case]:
        for position, inputs in enumerate(self._samples):
            yield _Case(f"recorded call {position}", inputs, self._eager(inputs))
        yield _Case(
            "strided inputs", strided_copies(self._samples[0]), self._eager(self._samples[0])
        )
        for label, sizes in corner_sizes(self._graph.dims).items():
            described = ", ".join(f"{name}={size}" for name, size in sizes.items())
            inputs = resize_inputs(self._graph, self._samples, sizes)
            try:
                reference = self._eager(inputs)
            except Exception as error:  # noqa: BLE001 - the module may refuse sizes it was never given
                self._skipped.append(f"{label} sizes ({described}): eager raised {error!r:.200}")
                continue
            yield _Case(f"{label} sizes ({described})", inputs, reference)

    def __call__(self, engine: Engine) -> CheckResult:
        """Compare an engine with eager on every case.

        Raises:
            ValidationError: An output differs; the error names it, the worst difference and its
                place.
            RecordingError: Eager itself is not repeatable.
        """
        self.prepare()
        assert self._cases is not None  # noqa: S101 - set by prepare
        worst = _Difference(0.0, 0.0, self._graph.outputs[0].path if self._graph.outputs else "")
        for case in self._cases:
            for difference in self._differences(engine, case):
                if difference.share >= worst.share:
                    worst = attrs.evolve(
                        difference, absolute=max(worst.absolute, difference.absolute)
                    )
        return CheckResult(
            cases=len(self._cases),
            worst_difference=worst.absolute,
            worst_output=worst.output,
            tolerance_share=worst.share,
            skipped=tuple(self._skipped),
        )

    def _differences(self, engine: Engine, case: _Case) -> Iterator[_Difference]:
        before = tuple(tensor.clone() for tensor in case.inputs)
        try:
            outputs = engine(case.inputs)
        except Exception as error:
            msg = f"the engine failed on {case.label}: {error}"
            raise ValidationError(msg, kind="execution", case=case.label) from error
        if len(outputs) != len(case.reference):
            msg = f"eager returns {len(case.reference)} tensors, the engine {len(outputs)}"
            raise ValidationError(
                msg, kind="count", expected=len(case.reference), got=len(outputs), case=case.label
            )
        for spec, tensor, copy in zip(self._graph.inputs, case.inputs, before, strict=True):
            if not same_bits(tensor, copy):
                msg = f"the engine wrote into input {spec.path!r} on {case.label}"
                raise ValidationError(msg, output=spec.path, kind="input", case=case.label)
        for spec, expected, got in zip(self._graph.outputs, case.reference, outputs, strict=True):
            if got.requires_grad:
                msg = f"output {spec.path!r} of the engine requires grad; engines compute none"
                raise ValidationError(msg, output=spec.path, kind="grad", case=case.label)
            yield _compare(spec, expected, got, case.label)


def _compare(spec: TensorSpec, expected: Tensor, got: Tensor, case: str) -> _Difference:
    facts: tuple[tuple[str, object, object], ...] = (
        ("dtype", dtype_name(expected.dtype), dtype_name(got.dtype)),
        ("shape", tuple(expected.shape), tuple(got.shape)),
        ("device", expected.device, got.device),
    )
    for kind, wanted, found in facts:
        if wanted != found:
            msg = f"output {spec.path!r} has {kind} {found}, eager gives {wanted}, on {case}"
            raise ValidationError(
                msg, output=spec.path, kind=kind, expected=wanted, got=found, case=case
            )
    if expected.numel() == 0:
        return _Difference(0.0, 0.0, spec.path)
    allowed_share = tolerance(expected.dtype)
    reference, values = _widened(expected), _widened(got)
    finite = torch.isfinite(reference)
    _compare_nonfinite(spec, reference, values, finite, case)
    difference = torch.where(finite, (values - reference).abs(), 0.0).to(torch.float64)
    magnitude = torch.where(finite, reference.abs(), 0.0).to(torch.float64)
    rms = magnitude.square().mean().sqrt()
    allowed = allowed_share * (magnitude + rms)
    share = torch.where(difference > 0, difference / allowed, 0.0)
    worst = int(share.argmax())
    result = _Difference(float(difference.max()), float(share.reshape(-1)[worst]), spec.path)
    if result.share > 1.0 or result.share != result.share:
        index = tuple(int(axis) for axis in torch.unravel_index(torch.tensor(worst), share.shape))
        wanted, found = expected[index].item(), got[index].item()
        msg = (
            f"output {spec.path!r} differs from eager at {index}: expected {wanted!r}, got "
            f"{found!r}, difference {float(difference.reshape(-1)[worst]):.3g} where "
            f"{float(allowed.reshape(-1)[worst]):.3g} is allowed for {dtype_name(expected.dtype)}, "
            f"on {case}"
        )
        raise ValidationError(
            msg,
            output=spec.path,
            kind="values",
            index=index,
            worst_difference=result.absolute,
            expected=wanted,
            got=found,
            case=case,
        )
    return result


def _widened(tensor: Tensor) -> Tensor:
    """Return values in a dtype that holds them exactly and can be subtracted."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64)
    # int64 does not fit float64: equal integers must stay equal, different ones different.
    return tensor.to(torch.int64)


def _compare_nonfinite(
    spec: TensorSpec, reference: Tensor, values: Tensor, finite: Tensor, case: str
) -> None:
    same = torch.where(
        finite,
        torch.isfinite(values),
        (reference == values) | (reference.isnan() & values.isnan()),
    )
    if not bool(same.all()):
        place = tuple(int(axis) for axis in (~same).nonzero()[0])
        wanted, found = reference[place].item(), values[place].item()
        msg = (
            f"output {spec.path!r} at {place} is {found!r}, eager gives {wanted!r} "
            f"(NaN and infinity must be where eager has them), on {case}"
        )
        raise ValidationError(
            msg,
            output=spec.path,
            kind="nonfinite",
            index=place,
            expected=wanted,
            got=found,
            case=case,
        )
