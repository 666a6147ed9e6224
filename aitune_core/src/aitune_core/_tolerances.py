"""How far results of a candidate may be from the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import torch

from aitune_core._precision import reduced_matmul
from aitune_core.errors import ConfigError

__all__ = [
    "TF32_TOLERANCE",
    "Tolerance",
    "check_tolerance",
    "check_tolerance_paths",
    "derived_tolerance",
    "given_tolerance",
    "tolerance",
    "trusted_error",
]

#: A relative error allowed for every output, or by path of the output.
Tolerance: TypeAlias = float | Mapping[str, float]

#: Allowed difference from eager as a share of an element's size plus the typical size of the
#: output, by dtype: about 1,000 units in the last place for float32, 10 for half precision, whose
#: reference is itself off by some.
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

#: How many times eager's own error a candidate's may be. Right engines on the CPU, which sum in
#: another order, had up to twice eager's in float32.
_MULTIPLE: Final = 4.0
#: What is allowed on top, since eager may be right by luck where an output has few elements, and
#: engines approximate functions otherwise: in half precision two units in the last place; in
#: float32 some ten times what was seen of right engines beyond eager's own error.
_FLOORS: Final = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
#: Where eager is off by more, it took another way than the reference: it rounded on purpose, or
#: compared numbers that are nearly equal.
_TRUSTED: Final = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 0.1}


def tolerance(dtype: torch.dtype) -> float:
    """Return the allowed relative difference from eager in ``dtype``; 0 means equal."""
    if dtype.is_floating_point or dtype.is_complex:
        return _TOLERANCES.get(dtype, _FLOAT8_TOLERANCE)
    return 0.0


def trusted_error(own: torch.dtype) -> float:
    """Return the largest error of eager in its own type with which a wider one is a reference."""
    return _TRUSTED[own]


def derived_tolerance(  # noqa: PLR0913
    dtype: torch.dtype,
    device: torch.device,
    *,
    computes: torch.dtype | None = None,
    own: torch.dtype | None = None,
    eager_error: float | None = None,
    recorded: bool = True,
) -> float:
    """Return the allowed relative error of an output.

    Where eager's own error is known, 4 times that, and 2e-5 for float32, 2e-3 for float16 or 1.6e-2
    for bfloat16. Else, on CUDA, and for values that nobody recorded, at least what `tolerance`
    says, or TF32 where that is on: kernels of one dtype lie that far apart.

    Args:
        dtype: Of the output.
        device: Of the output.
        computes: Coarser type in which the candidate says it computes.
        own: Type in which most of the module computes.
        eager_error: Eager's relative error; None where eager is the reference.
        recorded: Whether the values were recorded.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    reduced = dtype is torch.float32 and reduced_matmul(device)
    between = TF32_TOLERANCE if reduced else tolerance(dtype)
    if eager_error is None or own is None:
        allowed = between
    else:
        floor = _FLOORS.get(dtype.to_real(), between)
        if own.itemsize < torch.float32.itemsize:
            floor = max(floor, _FLOORS[own])
        allowed = _MULTIPLE * eager_error + floor
        if device.type == "cuda" or not recorded:
            allowed = max(allowed, between)
    return allowed if computes is None else max(allowed, tolerance(computes))


def given_tolerance(given: Tolerance | None, path: str) -> float | None:
    """Return what the user allows for an output; None where nothing was said."""
    if isinstance(given, Mapping):
        return given.get(path)
    return given


def check_tolerance(given: Any) -> None:  # noqa: ANN401
    """Check what a user allows, without knowing the outputs.

    Raises:
        ConfigError: It is neither a number nor a mapping of paths to numbers, or a number is
            negative or not finite.
    """
    if given is None:
        return
    by_path = given if isinstance(given, Mapping) else {None: given}
    for path, value in by_path.items():
        field = "tolerance" if path is None else f"tolerance[{path!r}]"
        named = path is None or isinstance(path, str)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (named and number and math.isfinite(value) and value >= 0):
            msg = (
                f"{field} must be a finite number >= 0, or tolerance a mapping from paths of "
                f"outputs to such numbers, got {value!r}"
            )
            raise ConfigError(msg, field=field, value=value, allowed="a finite number >= 0")


def check_tolerance_paths(given: Tolerance | None, known: Iterable[str]) -> None:
    """Check that outputs for which a user allows something exist.

    Raises:
        ConfigError: A path is unknown; the error lists those that are known.
    """
    paths = sorted(set(known))
    for path in given if isinstance(given, Mapping) else ():
        if path not in paths:
            msg = f"tolerance names the output {path!r}; the outputs are {', '.join(paths)}"
            raise ConfigError(msg, field="tolerance", value=path, allowed=paths)
