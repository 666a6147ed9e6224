"""What a strategy allows a candidate to take."""

from __future__ import annotations

import math
from typing import Any

import attrs

from aitune_core.errors import ConfigError

__all__ = ["Limits", "checked_number"]


def checked_number(name: str, value: Any) -> Any:  # noqa: ANN401 - what the user gave
    """Return a number that is above 0 and finite.

    Raises:
        ConfigError: It is not.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        msg = f"{name} must be a finite number above 0, got {value!r}; leave it out for no limit"
        raise ConfigError(msg, field=name, value=value, allowed="a finite number above 0")
    return value


def _limit(_owner: object, field: attrs.Attribute[Any], value: Any) -> None:  # noqa: ANN401
    if value is not None:
        checked_number(field.name, value)


@attrs.frozen(kw_only=True)
class Limits:
    """What a strategy allows a candidate to take; None allows everything.

    Attributes:
        max_memory_bytes: Memory to build, check and run it: device memory on CUDA, growth of the
            process on a CPU. It is measured, so that the candidate was built.
        max_error: `CheckResult.error`, the largest relative error on recorded calls.
        max_build_seconds: Time to build. A build in this process is not interrupted: a candidate
            that took longer is rejected when it is there.
        time_limit_s: Seconds for all candidates of all graphs of a module. When they are over, no
            candidate is begun, and the best so far wins.

    Raises:
        ConfigError: A limit is not a finite number above 0.
    """

    max_memory_bytes: int | None = attrs.field(default=None, validator=_limit)
    max_error: float | None = attrs.field(default=None, validator=_limit)
    max_build_seconds: float | None = attrs.field(default=None, validator=_limit)
    time_limit_s: float | None = attrs.field(default=None, validator=_limit)

    @classmethod
    def of(cls, **limits: Any) -> Limits:  # noqa: ANN401
        """Return limits by name.

        Raises:
            ConfigError: One is unknown, or is not a finite number above 0.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name, value in limits.items():
            if name not in known:
                msg = f"a strategy has no option {name!r}; its limits are: {', '.join(known)}"
                raise ConfigError(msg, field=name, value=value, allowed=tuple(known))
        return cls(**limits)
