"""The reference: what eager gives for the inputs that engines are compared on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from aitune_core._comparison import compare
from aitune_core._extremes import converts_to_indices, extreme_inputs, nudged
from aitune_core._flat import FlatModule
from aitune_core._precise import Correction, PreciseModule
from aitune_core._sorting import Sorting, apart, sorting_of
from aitune_core._synthesis import (
    corner_sizes,
    reordered_rows,
    resize_inputs,
    strided_copies,
)
from aitune_core._tolerances import TF32_TOLERANCE
from aitune_core._ways import other_ways
from aitune_core._widening import NotFollowedError
from aitune_core.errors import RecordingError, ValidationError
from aitune_core.specs import GraphSpec, dtype_name

__all__ = ["Case", "Reference", "described"]


@attrs.frozen
class Case:
    """Inputs, and what eager gives for them.

    Attributes:
        label: Where the inputs come from, in words.
        inputs: Flat inputs.
        reference: Eager's flat outputs; an error where the rest of its result is not as recorded.
        sizes: Sizes of the dims, where they are not those of a recorded call.
        strided: Whether engines get the inputs with other strides.
        reordered: Whether rows of a recorded call are in another order.
        scale: How much larger the values are than recorded ones; None where they were recorded.
        correction: What eager's outputs lack; None where eager is the reference.
    """

    label: str
    inputs: tuple[Tensor, ...]
    reference: tuple[Tensor, ...] | ValidationError
    sizes: Mapping[str, int] | None = None
    strided: bool = False
    reordered: bool = False
    scale: float | None = None
    correction: Correction | None = None

    @property
    def recorded(self) -> bool:
        """Whether the inputs are those of a recorded call."""
        return self.sizes is None and self.scale is None and not self.reordered

    @property
    def extreme(self) -> bool:
        """Whether the values are none that were recorded."""
        return self.scale is not None

    def fresh_inputs(self) -> tuple[Tensor, ...]:
        """Copies, so that an engine that writes into its inputs spoils nothing."""
        if self.strided:
            return strided_copies(self.inputs)
        return tuple(tensor.clone() for tensor in self.inputs)


class Reference:
    """Eager on all inputs that engines of one graph are compared on, computed once.

    These are every recorded call, inputs that are not contiguous, rows in another order, values
    that were not recorded, and the minimum, maximum and interior sizes of the dims. Where it can be
    had, what a wider type gives is the reference, and eager's distance from it is known.

    Args:
        graph: The graph.
        samples: Recorded flat inputs.
        results: Tensors in the recorded results, one sequence per sample.
        flat_module: The eager module on flat tensors.
        module_name: Name used in errors.
    """

    def __init__(
        self,
        graph: GraphSpec,
        samples: Sequence[tuple[Tensor, ...]],
        results: Sequence[tuple[Tensor, ...]],
        flat_module: FlatModule,
        module_name: str,
    ) -> None:
        self._graph = graph
        self._samples = samples
        self._results = results
        self._flat_module = flat_module
        self._module_name = module_name
        #: What is not compared, and why.
        self.skipped: list[str] = []
        self._cases: tuple[Case, ...] | None = None
        #: The type of the reference, such as ``"float64"``; ``"eager"`` where it is eager itself.
        self.name = "eager"
        #: Type in which most of the module computes; None where that is no floating-point type.
        self.own: torch.dtype | None = None

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self._flat_module.module

    def eager(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the module on copies of flat inputs; what it raises passes."""
        with torch.no_grad():
            outputs: tuple[Tensor, ...] = self._flat_module(*inputs)
        return outputs

    def cases(self) -> tuple[Case, ...]:
        """Return the cases; computed at the first call.

        Raises:
            RecordingError: Eager gives other values for the same inputs, or other ones than it
                gave when the call was recorded, or depends on the way a call is made.
        """
        if self._cases is None:
            recorded = [self._on_copies(position) for position in range(len(self._samples))]
            self._check_repeatable(recorded[0])
            self._check_recorded(recorded)
            smallest = min(range(len(recorded)), key=self._numel)
            self._check_ways(self._samples[smallest], recorded[smallest])
            cases = (
                *self._recorded_cases(recorded),
                *self._reordered_cases(),
                *self._extreme_cases(self._samples[smallest]),
                *self._corner_cases(),
            )
            corrected = tuple(self._corrected(cases))
            # What the code keeps outside of the module must be of its own type again.
            again = "after it ran in a wider type"
            self._check_same(recorded[0], self._on_copies(0), again)
            self._cases = corrected
        return self._cases

    def _corrected(self, cases: Sequence[Case]) -> list[Case]:
        """Add to cases what eager's outputs lack, and say where that is not known."""
        precise = PreciseModule(self._flat_module, self._graph, self._samples[0])
        self.own = precise.own
        if precise.wide is None:
            return list(cases)
        without: dict[str, list[str]] = {}
        corrected: list[Case] = []
        for case in cases:
            if isinstance(case.reference, ValidationError):
                corrected.append(case)
                continue
            first = corrected[0] if case.strided else None
            try:
                correction = (
                    precise.correction(case.inputs, case.reference)
                    if first is None
                    else first.correction
                )
            except NotFollowedError as error:
                correction = None
                without.setdefault(str(error), []).append(case.label)
            corrected.append(attrs.evolve(case, correction=correction))
        if any(case.correction is not None and case.recorded for case in corrected):
            self.name = dtype_name(precise.wide)
        self.skipped += [
            f"{', '.join(labels)}: eager itself is the reference, since in "
            f"{dtype_name(precise.wide)} {reason}"
            for reason, labels in without.items()
        ]
        return corrected

    def _numel(self, position: int) -> int:
        return sum(tensor.numel() for tensor in self._samples[position])

    def _on_copies(self, position: int) -> tuple[Tensor, ...]:
        try:
            return self.eager(self._samples[position])
        except ValidationError as error:
            raise self._otherwise(_copied(position), error) from error

    def _check_repeatable(self, first: Sequence[Tensor]) -> None:
        second = self._on_copies(0)
        try:
            for spec, one, other in zip(self._graph.outputs, first, second, strict=True):
                compare(spec, one, other, "the same call twice")
        except ValidationError as error:
            msg = (
                f"module {self._module_name!r} cannot be tuned: eager gives different results "
                f"for the same inputs at {error.output!r} (random numbers, or state)"
            )
            raise RecordingError(msg, module_name=self._module_name, path=error.output) from error

    def _check_recorded(self, outputs: Sequence[Sequence[Tensor]]) -> None:
        """Refuse a module that gives something else than when the calls were recorded."""
        for position, (recorded, again) in enumerate(zip(self._results, outputs, strict=True)):
            self._check_same(recorded, again, _copied(position))

    def _check_ways(self, inputs: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
        """Refuse a module to which the way of a call matters that an engine does not see."""
        for way, (outputs, expected) in other_ways(self._flat_module, self._graph, inputs):
            if isinstance(outputs, ValidationError):
                raise self._otherwise(way, outputs) from outputs
            self._check_same(expected or plain, outputs, way)

    def _check_same(self, expected: Sequence[Tensor], got: Sequence[Tensor], way: str) -> None:
        try:
            for spec, one, other in zip(self._graph.outputs, expected, got, strict=False):
                # Where the kernels are others, CUDA rounds otherwise, to TF32 by default.
                reduced = one.is_cuda and one.dtype is torch.float32
                share = TF32_TOLERANCE if reduced else None
                compare(spec, one, other, "the two calls", share=share)
        except ValidationError as error:
            raise self._otherwise(way, error) from error

    def _otherwise(self, way: str, error: ValidationError) -> RecordingError:
        msg = (
            f"module {self._module_name!r} cannot be tuned: {way}, it gives another result, so "
            "that it depends on more than the values of its arguments, such as on which of them "
            f"are one object, their strides, grad mode, the way the call is written, or state: "
            f"{error}"
        )
        return RecordingError(msg, module_name=self._module_name, path=error.output)

    def _recorded_cases(self, outputs: Sequence[tuple[Tensor, ...]]) -> Iterator[Case]:
        for position, inputs in enumerate(self._samples):
            yield Case(f"recorded call {position}", inputs, outputs[position])
        yield Case("strided inputs", self._samples[0], outputs[0], strided=True)

    def _reordered_cases(self) -> Iterator[Case]:
        """Yield recorded rows in another order: other values of the same shapes, all of them valid.

        Of the smallest call that has several rows.
        """
        label = "rows in another order"
        for position in sorted(range(len(self._samples)), key=self._numel):
            inputs = reordered_rows(self._graph, self._samples[position])
            if inputs is None:
                continue
            try:
                yield Case(label, inputs, self.eager(inputs), reordered=True)
            except ValidationError as error:
                yield Case(label, inputs, error, reordered=True)
            except Exception as error:  # noqa: BLE001 - the module may ask for an order
                self.skipped.append(f"{label}: eager raised {error!r:.200}")
            return

    def _extreme_cases(self, inputs: Sequence[Tensor]) -> Iterator[Case]:
        if any(tensor.is_cuda for tensor in inputs) and converts_to_indices(
            lambda: self.eager(inputs)
        ):
            # An index that is out of range ends the work of the whole process on CUDA.
            self.skipped.append("values that were not recorded: the module makes indices of values")
            return
        for label, changed, scale in extreme_inputs(self._graph, inputs):
            try:
                yield Case(label, changed, self.eager(changed), scale=scale)
            except ValidationError as error:
                yield Case(label, changed, error, scale=scale)
            except Exception:  # noqa: BLE001, S112 - of the user's module, for values of no sense
                continue

    def _corner_cases(self) -> Iterator[Case]:
        for name, sizes in corner_sizes(self._graph).items():
            label = f"{name} sizes ({described(sizes)})"
            inputs = self.resized(sizes)
            try:
                yield Case(label, inputs, self.eager(inputs), sizes)
            except ValidationError as error:
                yield Case(label, inputs, error, sizes)
            except Exception as error:  # noqa: BLE001 - the module may refuse sizes it never had
                self.skipped.append(f"{label}: eager raised {error!r:.200}")

    def resized(self, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        """Return recorded inputs in other sizes.

        They repeat recorded values; where the module sorts what becomes equal for that, they are
        moved apart.
        """
        inputs = resize_inputs(self._graph, self._samples, sizes)
        if self._sorts and self._sorting(inputs) is Sorting.TIES:
            return apart(inputs)
        return inputs

    @functools.cached_property
    def _sorts(self) -> bool:
        return self._sorting(self._samples[0]) is not Sorting.NONE

    def _sorting(self, inputs: Sequence[Tensor]) -> Sorting:
        try:
            return sorting_of(lambda: self.eager(inputs))
        except Exception:  # noqa: BLE001 - of the user's module, for sizes that it never had
            return Sorting.NONE

    def sensitivity(self, inputs: Sequence[Tensor]) -> list[float]:
        """Return how much each output moves when inputs move by their rounding errors.

        Shares as those of `compare`, so that 1 is as much as the whole output.
        """
        return nudged(self._graph, inputs, self.eager)


def _copied(position: int) -> str:
    return f"with copies of the tensors of recorded call {position}"


def described(sizes: Mapping[str, int]) -> str:
    """Return sizes in words."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
