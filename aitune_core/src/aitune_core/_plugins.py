"""The registry: backends and strategies by name, listed without heavy imports."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, NoReturn, TypeVar

import attrs
import pluggy
import torch

from aitune_core._built_in import BACKENDS, EAGER, INDUCTOR, STRATEGIES
from aitune_core._discovery import (
    CORE,
    Discovery,
    Source,
    check_blocked,
    disabled_plugins,
    distribution_version,
    installed_entry_points,
    suggestion,
)
from aitune_core.backend import Backend
from aitune_core.errors import (
    AituneError,
    BackendUnavailableError,
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    UnknownBackendError,
    UnknownStrategyError,
)
from aitune_core.hookspecs import (
    PROJECT_NAME,
    BackendReference,
    HookSpecs,
    StrategyReference,
)
from aitune_core.strategy import BackendSource, Strategy

__all__ = [
    "BackendInfo",
    "PluginRegistry",
    "StrategyInfo",
    "chosen_registry",
    "default_registry",
    "distribution_version",
]

_Class = TypeVar("_Class")


@attrs.frozen(kw_only=True)
class BackendInfo:
    """A backend as a listing shows it.

    Attributes:
        name: Name of the backend.
        summary: One sentence.
        distribution: Installed distribution that provides it.
        version: Version of that distribution.
        available: Whether every module that it needs is installed. Whether its devices and
            libraries work is checked when it is used.
        reason: Why it is not available.
    """

    name: str
    summary: str
    distribution: str
    version: str
    available: bool
    reason: str = ""


@attrs.frozen(kw_only=True)
class StrategyInfo:
    """A strategy as a listing shows it.

    Attributes:
        name: Name of the strategy.
        summary: One sentence.
        distribution: Installed distribution that provides it.
        version: Version of that distribution.
        reason: Why it cannot be used by its name; empty where it can.
    """

    name: str
    summary: str
    distribution: str
    version: str
    reason: str = ""


def _built_in(
    references: Sequence[BackendReference | StrategyReference],
) -> dict[str, list[Source]]:
    version = distribution_version(CORE)
    return {
        reference.name: [Source(reference, "aitune_core", CORE, version)]
        for reference in references
    }


def _merged(*tables: Mapping[str, list[Source]]) -> dict[str, list[Source]]:
    merged: dict[str, list[Source]] = {}
    for table in tables:
        for name, sources in table.items():
            merged.setdefault(name, []).extend(sources)
    return merged


class PluginRegistry:
    """What the core brings, and the plugins of one set of entry points.

    Args:
        entry_points: The entry points to load; None means those installed in group ``aitune``,
            without those that the variable ``AITUNE_DISABLE_PLUGINS`` names (names of plugins or
            distributions, separated by commas, or ``all``).
        blocked: Names of plugins or distributions that are not loaded, or ``"all"``.

    Raises:
        ConfigError: ``blocked`` holds something else than names.
    """

    def __init__(
        self,
        entry_points: Iterable[metadata.EntryPoint] | None = None,
        *,
        blocked: Collection[str] = (),
    ) -> None:
        self._given = None if entry_points is None else tuple(entry_points)
        self._blocked = check_blocked(blocked)
        self.refresh()

    def refresh(self) -> None:
        """Look again: for plugins that were installed, removed or repaired since.

        What was imported of a plugin stays imported, so a newer version of it needs a new process.
        """
        if self._given is None:
            blocked = (*self._blocked, *disabled_plugins())
            found = Discovery(installed_entry_points(), blocked)
        else:
            found = Discovery(self._given, self._blocked)
        self._found = found
        self._backends = _merged(_built_in(BACKENDS), found.backends)
        self._strategies = _merged(_built_in(STRATEGIES), found.strategies)

    @property
    def failures(self) -> list[PluginLoadError]:
        """Why a plugin is missing, one error per entry point."""
        return self._found.failures

    def observers(self) -> pluggy.PluginManager:
        """Return a new manager with the plugins of this registry, for one tuning to extend."""
        manager = pluggy.PluginManager(PROJECT_NAME)
        manager.add_hookspecs(HookSpecs)
        for name, plugin in self._found.manager.list_name_plugin():
            manager.register(plugin, name=name)
        return manager

    def backend_infos(self) -> tuple[BackendInfo, ...]:
        """Return the registered backends, by name; imports none of them."""
        return tuple(self._info(sources) for _, sources in sorted(self._backends.items()))

    def strategy_infos(self) -> tuple[StrategyInfo, ...]:
        """Return the registered strategies, by name; imports none of them."""
        return tuple(
            StrategyInfo(
                name=name,
                summary=sources[0].reference.summary,
                distribution=sources[0].distribution,
                version=sources[0].version,
                reason=_conflict(sources),
            )
            for name, sources in sorted(self._strategies.items())
        )

    @staticmethod
    def _info(sources: list[Source]) -> BackendInfo:
        source = sources[0]
        missing = [module for module in source.reference.requires if not _installed(module)]
        reason = f"{', '.join(missing)} not installed" if missing else ""
        reason = _conflict(sources) or reason
        return BackendInfo(
            name=source.reference.name,
            summary=source.reference.summary,
            distribution=source.distribution,
            version=source.version,
            available=not reason,
            reason=reason,
        )

    def backend_class(self, name: str) -> type[Backend]:
        """Import and return the class of a backend.

        Raises:
            UnknownBackendError: No plugin registered the name.
            PluginConflictError: Two plugins registered it.
            BackendUnavailableError: A module that it needs is not installed.
            PluginLoadError: Its class cannot be imported.
        """
        source = self._source(self._backends, name, "backend", UnknownBackendError)
        missing = [module for module in source.reference.requires if not _installed(module)]
        if missing:
            hint = f"python -m pip install {source.distribution}"
            msg = (
                f"backend {name!r} needs {', '.join(missing)}, which is not installed; run: {hint}"
            )
            raise BackendUnavailableError(
                msg, backend_name=name, missing=missing[0], install_hint=hint
            )
        return self._import(source, Backend)  # type: ignore[type-abstract]

    def backend(self, name: str, **options: Any) -> Backend:  # noqa: ANN401
        """Return a backend by name, configured with ``options``.

        Raises:
            ConfigError: An option is unknown or its value cannot be used.
            UnknownBackendError, PluginConflictError, BackendUnavailableError, PluginLoadError:
                As `backend_class`.
        """
        backend_class = self.backend_class(name)
        return backend_class(backend_class.config_class.from_options(options))

    def resolve(self, sources: Iterable[BackendSource] | None) -> tuple[Backend, ...]:
        """Return backends for objects, names and ``(name, options)`` pairs.

        None means every backend whose modules are installed, in the order of `default_backends`.
        """
        if sources is None:
            available = {info.name for info in self.backend_infos() if info.available}
            sources = [name for name in self._default_names() if name in available]
            if not sources:
                self._fail_without_backends("no backend is installed", "")
        backends = []
        for source in sources:
            if isinstance(source, Backend):
                backends.append(source)
            elif isinstance(source, str):
                backends.append(self.backend(source))
            else:
                name, options = (
                    (source["backend"], source.get("options", {}))
                    if isinstance(source, Mapping)
                    else source
                )
                backends.append(self.backend(name, **_options(options)))
        return tuple(backends)

    def default_backends(
        self, device: torch.device
    ) -> tuple[tuple[Backend, ...], dict[str, AituneError]]:
        """Return the backends that are tried where none is named, and why others are left out.

        These are all that can run on ``device`` here: those of plugins by name, then
        ``"inductor"``. ``"eager"`` is not among them, since it is measured beside every candidate.

        Returns:
            The backends, each with its default configuration; and by name, what stands in the way
            of those that are registered and cannot run here.

        Raises:
            BackendUnavailableError: None can run here.
        """
        backends: list[Backend] = []
        left_out: dict[str, AituneError] = {}
        for name in self._default_names():
            try:
                backend = self.backend(name)
                backend.check_available(device)
            except AituneError as error:
                left_out[name] = error
            else:
                backends.append(backend)
        if not backends:
            reasons = "".join(f"\n  {name}: {error}" for name, error in left_out.items())
            self._fail_without_backends(f"no backend can run on {device}", reasons)
        return tuple(backends), left_out

    def _default_names(self) -> list[str]:
        """Return the names of plugins' backends in order, and then those of the core."""
        return [*sorted(set(self._backends) - {EAGER, INDUCTOR}), INDUCTOR]

    def _fail_without_backends(self, what: str, reasons: str) -> NoReturn:
        hint = "python -m pip install aitune-backend-onnxruntime"
        msg = f"{what}; run: {hint}{reasons}{self._failure_text()}"
        raise BackendUnavailableError(msg, install_hint=hint)

    def strategy(self, name: str, **options: Any) -> Strategy:  # noqa: ANN401
        """Return a strategy by name, made with ``options``.

        Raises:
            UnknownStrategyError: No plugin registered the name.
            ConfigError: It cannot be made with these options.
        """
        strategy_class = self.strategy_class(name)
        try:
            return strategy_class(**options)
        except TypeError as error:
            msg = (
                f"strategy {name!r} cannot be made from its name with options {sorted(options)}: "
                f"{error}; pass an instance, such as OneBackendStrategy('onnxruntime')"
            )
            raise ConfigError(msg, field="options", value=options) from error

    def strategy_class(self, name: str) -> type[Strategy]:
        """Import and return the class of a strategy.

        Raises:
            UnknownStrategyError: No plugin registered the name.
            PluginConflictError: Two plugins registered it.
            PluginLoadError: Its class cannot be imported.
        """
        source = self._source(self._strategies, name, "strategy", UnknownStrategyError)
        return self._import(source, Strategy)  # type: ignore[type-abstract]

    def _source(
        self,
        table: Mapping[str, list[Source]],
        name: Any,  # noqa: ANN401 - what the user gave
        kind: str,
        error: type[UnknownBackendError | UnknownStrategyError],
    ) -> Source:
        sources = table.get(name) if isinstance(name, str) else None
        if not sources:
            known = sorted(table)
            msg = (
                f"unknown {kind} {name!r}; known: {', '.join(known) or 'none'}"
                + suggestion(str(name), known)
                + self._failure_text()
            )
            raise error(
                msg, plugin=name, known=known, failures=[str(each) for each in self.failures]
            )
        if len(sources) > 1:
            origins = [each.origin for each in sources]
            msg = f"{kind} {name!r} is {_conflict(sources)}; uninstall one of them"
            raise PluginConflictError(msg, plugin=name, distributions=origins)
        return sources[0]

    def _failure_text(self) -> str:
        reasons = (*self.failures, *self._found.blocked)
        return "".join(f"\n  not loaded: {reason}" for reason in reasons)

    @staticmethod
    def _import(source: Source, base: type[_Class]) -> type[_Class]:
        """Import the class that a reference names."""
        target = source.reference.target
        module_name, _, class_name = target.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            msg = (
                f"{target!r} of {source.distribution} {source.version} cannot be imported: "
                f"{type(error).__name__}: {error}"
            )
            raise PluginLoadError(
                msg, plugin=source.plugin, distribution=source.distribution
            ) from error
        if not (isinstance(found, type) and issubclass(found, base)):
            msg = f"{target!r} of {source.distribution} is no {base.__name__}, got {found!r}"
            raise PluginLoadError(msg, plugin=source.plugin, distribution=source.distribution)
        return found

    def provides(self, backend_class: type[Backend]) -> bool:
        """Whether exactly this class is registered under its name."""
        sources = self._backends.get(backend_class.name, [])
        target = f"{backend_class.__module__}:{backend_class.__qualname__}"
        return len(sources) == 1 and sources[0].reference.target == target

    def distribution_of(self, name: str) -> tuple[str, str]:
        """Return distribution and version that provide a backend; empty where none does."""
        sources = self._backends.get(name)
        return (sources[0].distribution, sources[0].version) if sources else ("", "")


def _conflict(sources: Sequence[Source]) -> str:
    """Return which distributions register one name; nothing where one alone does."""
    origins = [each.origin for each in sources]
    return f"registered by {' and '.join(origins)}" if len(origins) > 1 else ""


def _options(options: object) -> dict[str, Any]:
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        msg = f"options must map names to values, got {options!r}"
        raise ConfigError(msg, field="options", value=options, allowed="a mapping")
    return dict(options)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@functools.lru_cache(maxsize=1)
def default_registry() -> PluginRegistry:
    """Return the registry of the installed plugins, made once.

    Its method ``refresh`` looks again.
    """
    return PluginRegistry()


def chosen_registry(registry: PluginRegistry | None) -> PluginRegistry:
    """Return a registry that a caller gave, or that of the installed plugins for None.

    Raises:
        ConfigError: It is no registry.
    """
    if registry is None:
        return default_registry()
    if not isinstance(registry, PluginRegistry):
        msg = f"registry must be a PluginRegistry, got {registry!r}; leave it out for the installed"
        raise ConfigError(msg, field="registry", value=registry, allowed="PluginRegistry or None")
    return registry
