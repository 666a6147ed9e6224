"""Objects that a command names as ``module:name``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aitune_core.errors import ConfigError

__all__ = ["called"]


def called(reference: str, option: str) -> Any:  # noqa: ANN401 - of the user
    """Return what the function returns that a reference names.

    The working directory is searched first, as ``python -m`` does.

    Raises:
        ConfigError: The reference leads nowhere.
        Exception: The function raises.
    """
    return _function(reference, option)()


def _function(reference: str, option: str) -> Callable[[], Any]:
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        msg = f"{option} must be written module:name, got {reference!r}; such as models:make"
        raise ConfigError(msg, field=option, value=reference, allowed="module:name")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        msg = f"{option}: there is no module {module_name!r} in {folder}, nor installed"
        raise ConfigError(msg, field=option, value=reference) from error
    for part in name.split("."):
        if not hasattr(found, part):
            msg = f"{option}: {module_name} has no {name!r}"
            raise ConfigError(msg, field=option, value=reference)
        found = getattr(found, part)
    if not callable(found):
        msg = f"{option}: {reference} must be a function without arguments, got {found!r:.80}"
        raise ConfigError(msg, field=option, value=reference, allowed="a function")
    function: Callable[[], Any] = found
    return function
