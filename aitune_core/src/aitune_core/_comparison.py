"""One output of an engine compared with the reference."""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from aitune_core._tensors import same_bits
from aitune_core._tolerances import tolerance
from aitune_core.errors import ValidationError
from aitune_core.specs import TensorSpec, dtype_name

__all__ = ["Difference", "compare", "relative_error", "same_places"]

#: Elements larger than this many lower quartiles count as that large in the typical size, so that
#: the lowest number of a masked score does not excuse all others.
_OUTLIER: Final = 16.0


@attrs.frozen
class Difference:
    """How far an output is from the reference.

    Attributes:
        absolute: Largest absolute difference of an element.
        share: Largest difference as a share of what is allowed for the element.
        output: Path of the output.
        case: Which input gave it, in words.
        index: Place of the element with that share.
        error: Largest difference as a share of the element's size plus the typical size of the
            output; for integers the number 1 where one differs.
        allowed: What is allowed of that, for values of any size.
    """

    absolute: float
    share: float
    output: str
    case: str = ""
    index: tuple[int, ...] = ()
    error: float = 0.0
    allowed: float = 0.0


def compare(  # noqa: PLR0913
    spec: TensorSpec,
    expected: Tensor,
    got: Tensor,
    case: str,
    *,
    share: float | None = None,
    floor: float = 0.0,
    lacking: Tensor | None = None,
) -> Difference:
    """Compare an output with eager's, or with what eager's should be.

    Args:
        spec: The output.
        expected: Eager's tensor.
        got: The engine's tensor.
        case: Which input gave it, in words.
        share: Allowed relative difference; None means what may lie between two kernels of the
            dtype.
        floor: Allowed absolute difference on top of it, for floating-point outputs.
        lacking: What has to be added to eager's tensor to have the reference; None means nothing.

    Raises:
        ValidationError: Dtype, shape, device or an element differs. Eager's very bits never do.
    """
    _compare_facts(spec, expected, got, case)
    if expected.numel() == 0:
        return Difference(0.0, 0.0, spec.path, case)
    expected, got = expected.detach(), got.detach()
    reference, values = _widened(expected), _widened(got)
    _compare_nonfinite(spec, reference, values, case)
    if lacking is not None:
        reference = reference + lacking.to(reference.dtype)
    if reference.dtype is torch.int64:
        difference, scale = _integer_difference(reference, values)
        relative = 0.0
        allowed = scale.new_zeros(scale.shape)
    else:
        relative = tolerance(expected.dtype) if share is None else share
        difference, scale = _float_difference(reference, values)
        allowed = relative * scale + floor
    error = float(torch.where(difference > 0, difference / scale, 0.0).max())
    shares = torch.where(difference > 0, difference / allowed, 0.0)
    worst = int(shares.argmax())
    place = torch.unravel_index(torch.tensor(worst), shares.shape)
    index = tuple(int(axis) for axis in place)
    absolute, most = float(difference.max()), float(shares[index])
    if same_bits(expected, got):
        return Difference(0.0, 0.0, spec.path, case, index, error, relative)
    if not most <= 1.0:
        wanted, found = expected[index].item(), got[index].item()
        exact = "" if lacking is None else f", {reference[index].item()!r} is right"
        msg = (
            f"output {spec.path!r} differs from eager at {index}: expected {wanted!r}{exact}, got "
            f"{found!r}, difference {float(difference[index]):.3g} where "
            f"{float(allowed[index]):.3g} is allowed for {dtype_name(expected.dtype)}, on {case}"
        )
        raise ValidationError(
            msg,
            output=spec.path,
            kind="values",
            index=index,
            worst_difference=absolute,
            expected=wanted,
            got=found,
            case=case,
        )
    return Difference(absolute, most, spec.path, case, index, error, relative)


def relative_error(reference: Tensor, values: Tensor) -> float:
    """Return the largest difference, over the element's size plus the typical size of all.

    Args:
        reference: Real or complex numbers, at least one.
        values: As many, with NaN and infinity in the same places.
    """
    difference, scale = _float_difference(_widened(reference.detach()), _widened(values.detach()))
    # Smaller numbers have fewer digits in the dtype, down to none.
    scale = scale + torch.finfo(values.dtype).tiny
    return float(torch.where(difference > 0, difference / scale, 0.0).max())


def same_places(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have NaN and infinities in the same places."""
    return bool(_same_nonfinite(_widened(one.detach()), _widened(other.detach())).all())


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
    """Return difference and scale; in float64, since int64 may not hold them."""
    distance = (values.to(torch.float64) - reference.to(torch.float64)).abs()
    difference = torch.where(values == reference, 0.0, distance.clamp(min=1.0))
    return difference, difference


def _float_difference(reference: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return difference and scale: an element's size plus the typical size of all."""
    finite = torch.isfinite(reference)
    difference = torch.where(finite, (values - reference).abs(), 0.0)
    magnitude = torch.where(finite, reference.abs(), 0.0)
    return difference, magnitude + _typical_size(magnitude)


def _typical_size(magnitude: Tensor) -> Tensor:
    """Root mean square of the elements that are not 0, with outliers cut down."""
    present = magnitude[magnitude > 0]
    if present.numel() == 0:
        return magnitude.new_zeros(())
    quartile = present.kthvalue((present.numel() + 3) // 4).values
    return quartile * (present / quartile).clamp(max=_OUTLIER).square().mean().sqrt()


def _same_nonfinite(reference: Tensor, values: Tensor) -> Tensor:
    return torch.where(
        torch.isfinite(reference),
        torch.isfinite(values),
        (reference == values) | (reference.isnan() & values.isnan()),
    )


def _compare_nonfinite(spec: TensorSpec, reference: Tensor, values: Tensor, case: str) -> None:
    same = _same_nonfinite(reference, values)
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
