"""Arguments that more than one public function takes, checked in one place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aitune_core.errors import ConfigError
from aitune_core.strategy import Strategy

__all__ = [
    "check_after_tune",
    "check_name",
    "check_on_miss",
    "check_strategy",
    "check_tune_arguments",
    "checked_path",
]

_ON_MISS: Final = ("eager", "error")
_AFTER_TUNE: Final = ("keep", "offload", "release")


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        msg = f"{field} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
        raise ConfigError(msg, field=field, value=value, allowed=allowed)


def check_on_miss(on_miss: object) -> None:
    """Check a way to treat misses.

    Raises:
        ConfigError: It is unknown.
    """
    _check_choice("on_miss", on_miss, _ON_MISS)


def check_name(name: object) -> None:
    """Check the name of a module; None is the default.

    Raises:
        ConfigError: It is no string, or empty.
    """
    if name is not None and not (isinstance(name, str) and name):
        msg = f"name must be a non-empty string, got {name!r}"
        raise ConfigError(msg, field="name", value=name, allowed="a non-empty string")


def check_strategy(strategy: object) -> None:
    """Check that a strategy is an instance or a name.

    Raises:
        ConfigError: It is neither.
    """
    if not isinstance(strategy, Strategy | str):
        kind = "a class; make an instance" if isinstance(strategy, type) else repr(strategy)
        msg = f"strategy must be a Strategy or a name, got {kind}"
        raise ConfigError(msg, field="strategy", value=strategy, allowed="Strategy or str")


def check_after_tune(after_tune: object) -> None:
    """Check what becomes of the weights after tuning.

    Raises:
        ConfigError: It is unknown.
    """
    _check_choice("after_tune", after_tune, _AFTER_TUNE)


def checked_path(path: object) -> Path:
    """Return a path that a caller gave.

    Raises:
        ConfigError: It is no path, empty, or has a null character.
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str) or not given or "\0" in given:
        msg = f"path must be a file name such as 'model.ait' or a pathlib.Path, got {path!r}"
        raise ConfigError(msg, field="path", value=path, allowed="a non-empty str or a Path")
    return Path(given)


def check_tune_arguments(
    func: object, batch_sizes: Sequence[int] | None, max_calls: int | None, on_failure: object
) -> None:
    """Check what `tune` was given, apart from the calls.

    Raises:
        ConfigError: One of them cannot be used.
    """
    if not callable(func):
        msg = f"func must be a Module or a callable that calls one, got {func!r}"
        raise ConfigError(msg, field="func", value=func, allowed="a Module or a callable")
    if batch_sizes is not None and not isinstance(batch_sizes, tuple | list | range):
        msg = f"batch_sizes must be a sequence of integers such as [1, 8], got {batch_sizes!r}"
        raise ConfigError(msg, field="batch_sizes", value=batch_sizes, allowed="integers >= 1")
    for field, values in (
        ("batch_sizes", batch_sizes),
        ("max_calls", None if max_calls is None else [max_calls]),
    ):
        for value in values or ():
            if not _is_count(value):
                msg = f"{field} takes integers >= 1, got {value!r}"
                raise ConfigError(msg, field=field, value=value, allowed="integers >= 1")
    if on_failure not in ("raise", "eager"):
        msg = f"on_failure must be 'raise' or 'eager', got {on_failure!r}"
        raise ConfigError(msg, field="on_failure", value=on_failure, allowed=("raise", "eager"))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
