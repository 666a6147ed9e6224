"""Finding plugins: entry points, each behind a guard, and the references that they register."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from importlib import metadata
from typing import Any, Final

import attrs
import pluggy

from aitune_core.errors import ConfigError, PluginLoadError, PluginLoadWarning
from aitune_core.hookspecs import (
    API_VERSION,
    PROJECT_NAME,
    BackendReference,
    HookSpecs,
    StrategyReference,
)

__all__ = [
    "CORE",
    "Discovery",
    "Source",
    "check_blocked",
    "disabled_plugins",
    "distribution_version",
    "installed_entry_points",
    "suggestion",
]

#: The distribution of the core.
CORE: Final = "aitune-core"
_VARIABLE: Final = "AITUNE_DISABLE_PLUGINS"
#: Values of the variable that block every plugin.
_ALL: Final = frozenset({"*", "1", "all"})
_HOOKS: Final = tuple(name for name in vars(HookSpecs) if name.startswith(f"{PROJECT_NAME}_"))
_UNKNOWN: Final = "an unknown distribution"


@attrs.frozen
class Source:
    """Where a reference comes from.

    Attributes:
        reference: What was registered.
        plugin: Name of the entry point.
        distribution: Installed distribution that provides it.
        version: Version of that distribution.
    """

    reference: Any
    plugin: str
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".strip()


class Discovery:
    """The plugins of some entry points.

    Args:
        entry_points: The entry points.
        blocked: Names of plugins or distributions that are not loaded, or ``"all"``.

    Attributes:
        manager: The plugins that were loaded.
        failures: Why a plugin is missing, one error per entry point.
        blocked: Plugins that were not loaded because they are blocked, in words.
        backends: What was registered, by name.
        strategies: As ``backends``.
    """

    def __init__(
        self, entry_points: Iterable[metadata.EntryPoint], blocked: Collection[str] = ()
    ) -> None:
        self.manager = pluggy.PluginManager(PROJECT_NAME)
        self.manager.add_hookspecs(HookSpecs)
        self.failures: list[PluginLoadError] = []
        self.blocked: list[str] = []
        self.backends: dict[str, list[Source]] = {}
        self.strategies: dict[str, list[Source]] = {}
        self._blocked = frozenset(map(_canonical, blocked))
        for entry_point in sorted(entry_points, key=lambda entry: (entry.name, entry.value)):
            self._load(entry_point)

    def _load(self, entry_point: metadata.EntryPoint) -> None:
        distribution, version = _origin(entry_point)
        names = {_canonical(entry_point.name), _canonical(distribution)}
        if self._blocked & (names | _ALL):
            self.blocked.append(f"plugin {entry_point.name!r} of {distribution} is blocked")
            return
        registered = f"{distribution}:{entry_point.name}"
        try:
            plugin = entry_point.load()
            _check_plugin(plugin)
            self.manager.register(plugin, name=registered)
            self.manager.check_pending()
            self._collect(plugin, entry_point.name, distribution, version)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a plugin may even raise SystemExit on import
            if self.manager.has_plugin(registered):
                self.manager.unregister(name=registered)
            msg = (
                f"plugin {entry_point.name!r} of {distribution} {version} could not be loaded: "
                f"{type(error).__name__}: {error}"
            )
            failure = PluginLoadError(msg, plugin=entry_point.name, distribution=distribution)
            failure.__cause__ = error
            self.failures.append(failure)
            warnings.warn(msg, PluginLoadWarning, stacklevel=2)

    def _collect(self, plugin: object, name: str, distribution: str, version: str) -> None:
        for hook, kind, table in (
            ("aitune_register_backends", BackendReference, self.backends),
            ("aitune_register_strategies", StrategyReference, self.strategies),
        ):
            implementation = getattr(plugin, hook, None)
            references = [] if implementation is None else list(implementation())
            for reference in references:
                if not isinstance(reference, kind):
                    msg = f"{hook} must return {kind.__name__} objects, got {reference!r}"
                    raise PluginLoadError(msg)
            for reference in references:
                source = Source(reference, name, distribution, version)
                table.setdefault(reference.name, []).append(source)


def _check_plugin(plugin: object) -> None:
    version = getattr(plugin, "AITUNE_API_VERSION", None)
    if version != API_VERSION:
        core = f"{CORE} {distribution_version(CORE)}".strip()
        msg = (
            f"it was written for plugin API {version}, {core} has {API_VERSION}; install versions "
            "of both that match"
        )
        raise PluginLoadError(msg)
    known = ", ".join(_HOOKS)
    for name in dir(plugin):
        ours = name.startswith(f"{PROJECT_NAME}_")  # packages of that name are no functions
        if ours and name not in _HOOKS and callable(getattr(plugin, name)):
            msg = f"there is no hook {name!r}{suggestion(name, _HOOKS)}; hooks are: {known}"
            raise PluginLoadError(msg)
    if not any(hasattr(plugin, name) for name in _HOOKS):
        msg = f"it implements no hook, of which there are: {known}"
        raise PluginLoadError(msg)


def disabled_plugins() -> tuple[str, ...]:
    """Return the names in ``AITUNE_DISABLE_PLUGINS``, which are separated by commas."""
    return tuple(filter(None, map(str.strip, os.environ.get(_VARIABLE, "").split(","))))


def installed_entry_points() -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of plugins that are installed now."""
    importlib.invalidate_caches()
    return tuple(metadata.entry_points(group=PROJECT_NAME))


def check_blocked(blocked: object) -> tuple[str, ...]:
    """Return names of plugins to block.

    Raises:
        ConfigError: They are no names.
    """
    names = () if isinstance(blocked, str) or not isinstance(blocked, Collection) else blocked
    if names is not blocked or not all(isinstance(name, str) and name for name in names):
        msg = f"blocked must be names of plugins or distributions, got {blocked!r}"
        raise ConfigError(msg, field="blocked", value=blocked, allowed="names")
    return tuple(names)


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return words that suggest the known name that is nearest; nothing where none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _origin(entry_point: metadata.EntryPoint) -> tuple[str, str]:
    """Return distribution and version; metadata on disk may lack either, or be unreadable."""
    if entry_point.dist is None:
        return (_UNKNOWN, "")
    try:
        facts = entry_point.dist.metadata
        name, version = facts["Name"], facts["Version"]
    except Exception:  # noqa: BLE001 - whatever reading somebody's metadata raises
        return (_UNKNOWN, "")
    return (name or _UNKNOWN, version or "")


def distribution_version(distribution: str) -> str:
    """Return the version of an installed distribution; empty where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
