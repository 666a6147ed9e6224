"""Arguments that more than one public function takes, checked in one place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from aitune_core.errors import ConfigError
from aitune_core.strategy import Strategy

__all__ = ["check_after_tune", "check_name", "check_on_miss", "check_strategy", "checked_path"]

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
        ConfigError: It is no path, or empty.
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str) or not given:
        msg = f"path must be a file name such as 'model.ait' or a pathlib.Path, got {path!r}"
        raise ConfigError(msg, field="path", value=path, allowed="a non-empty str or a Path")
    return Path(given)
