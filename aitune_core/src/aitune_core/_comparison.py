"""One output of an engine compared with eager's."""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from aitune_core.errors import ValidationError
from aitune_core.specs import TensorSpec, dtype_name

__all__ = ["TF32_TOLERANCE", "Difference", "compare", "tolerance"]

#: Allowed difference as a share of an element's size plus the typical size of the output, by
#: dtype: about 1,000 units in the last place for float32, 10 for half precision, whose reference
#: is itself off by some.
_TOLERANCES: Final = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}
_FLOAT8_TOLERANCE: Final = 0.25
#: For float32 where the user lets PyTorch multiply matrices in TF32: 10 of its units.
TF32_TOLERANCE: Final = 5e-3
#: Elements larger than this many lower quartiles count as that large in the typical size, so that
#: the lowest number of a masked score does not excuse all others.
_OUTLIER: Final = 16.0


def tolerance(dtype: torch.dtype) -> float:
    """Return the allowed relative difference for outputs of ``dtype``; 0 means equal."""
    if dtype.is_floating_point or dtype.is_complex:
        return _TOLERANCES.get(dtype, _FLOAT8_TOLERANCE)
    return 0.0


@attrs.frozen
class Difference:
    """How far an output is from eager's.

    Attributes:
        absolute: Largest absolute difference of an element.
        share: Largest difference as a share of what is allowed for the element.
        output: Path of the output.
    """

    absolute: float
    share: float
    output: str


def compare(  # noqa: PLR0913
    spec: TensorSpec,
    expected: Tensor,
    got: Tensor,
    case: str,
    *,
    share: float | None = None,
    floor: float = 0.0,
) -> Difference:
    """Compare an output with eager's.

    Args:
        spec: The output.
        expected: Eager's tensor.
        got: The engine's tensor.
        case: Which input gave it, in words.
        share: Allowed relative difference; None means that of the dtype.
        floor: Allowed absolute difference on top of it, for floating-point outputs.

    Raises:
        ValidationError: Dtype, shape, device or an element differs.
    """
    _compare_facts(spec, expected, got, case)
    if expected.numel() == 0:
        return Difference(0.0, 0.0, spec.path)
    expected, got = expected.detach(), got.detach()
    reference, values = _widened(expected), _widened(got)
    _compare_nonfinite(spec, reference, values, case)
    difference, allowed = (
        _integer_difference(reference, values)
        if reference.dtype is torch.int64
        else _float_difference(
            reference, values, tolerance(expected.dtype) if share is None else share, floor
        )
    )
    shares = torch.where(difference > 0, difference / allowed, 0.0)
    worst = int(shares.argmax())
    result = Difference(float(difference.max()), float(shares.reshape(-1)[worst]), spec.path)
    if not result.share <= 1.0:
        place = torch.unravel_index(torch.tensor(worst), shares.shape)
        index = tuple(int(axis) for axis in place)
        wanted, found = expected[index].item(), got[index].item()
        msg = (
            f"output {spec.path!r} differs from eager at {index}: expected {wanted!r}, got "
            f"{found!r}, difference {float(difference[index]):.3g} where "
            f"{float(allowed[index]):.3g} is allowed for {dtype_name(expected.dtype)}, on {case}"
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


def _compare_facts(spec: TensorSpec, expected: Tensor, got: Tensor, case: str) -> None:
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


def _widened(tensor: Tensor) -> Tensor:
    """Return values in a dtype that holds them exactly and can be subtracted."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64)
    # Not float64, in which different integers become equal.
    return tensor.to(torch.int64)


def _integer_difference(reference: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return difference and allowed difference; in float64, since int64 may not hold them."""
    distance = (values.to(torch.float64) - reference.to(torch.float64)).abs()
    difference = torch.where(values == reference, 0.0, distance.clamp(min=1.0))
    return difference, torch.zeros_like(difference)


def _float_difference(
    reference: Tensor, values: Tensor, share: float, floor: float
) -> tuple[Tensor, Tensor]:
    finite = torch.isfinite(reference)
    difference = torch.where(finite, (values - reference).abs(), 0.0)
    magnitude = torch.where(finite, reference.abs(), 0.0)
    return difference, share * (magnitude + _typical_size(magnitude)) + floor


def _typical_size(magnitude: Tensor) -> Tensor:
    """Root mean square of the elements that are not 0, with outliers cut down."""
    present = magnitude[magnitude > 0]
    if present.numel() == 0:
        return magnitude.new_zeros(())
    quartile = present.kthvalue((present.numel() + 3) // 4).values
    return quartile * (present / quartile).clamp(max=_OUTLIER).square().mean().sqrt()


def _compare_nonfinite(spec: TensorSpec, reference: Tensor, values: Tensor, case: str) -> None:
    same = torch.where(
        torch.isfinite(reference),
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
