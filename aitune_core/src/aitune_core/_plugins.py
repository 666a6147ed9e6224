"""Plugins: found through entry points, each behind a guard, listed without heavy imports."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Final, NoReturn, TypeVar

import attrs
import pluggy
import torch

from aitune_core.backend import Backend
from aitune_core.errors import (
    AituneError,
    BackendUnavailableError,
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginLoadWarning,
    UnknownBackendError,
    UnknownStrategyError,
)
from aitune_core.hookspecs import (
    API_VERSION,
    PROJECT_NAME,
    BackendReference,
    HookSpecs,
    StrategyReference,
)
from aitune_core.strategy import BackendSource, Strategy

__all__ = [
    "BackendInfo",
    "PluginRegistry",
    "chosen_registry",
    "default_registry",
    "distribution_version",
]

_EAGER: Final = "eager"
_INDUCTOR: Final = "inductor"
_BACKENDS: Final = (
    BackendReference(_EAGER, "aitune_core._eager:EagerBackend", "The module as it is."),
    BackendReference(
        _INDUCTOR, "aitune_core._inductor:InductorBackend", "PyTorch's compiler, as torch.compile."
    ),
)
_STRATEGIES: Final = (
    StrategyReference(
        "latency_budget",
        "aitune_core._throughput:LatencyBudgetStrategy",
        "The backend with most samples per second within a latency.",
    ),
    StrategyReference(
        "max_throughput",
        "aitune_core._throughput:MaxThroughputStrategy",
        "The backend with most samples per second.",
    ),
    StrategyReference(
        "min_latency",
        "aitune_core._fastest:MinLatencyStrategy",
        "The backend with the lowest latency on recorded calls.",
    ),
    StrategyReference(
        "per_graph",
        "aitune_core._per_graph:PerGraphStrategy",
        "Another strategy for each graph.",
    ),
    StrategyReference(
        "first_wins",
        "aitune_core._strategies:FirstWinsStrategy",
        "The first backend that is right and faster than eager.",
    ),
    StrategyReference(
        "one_backend", "aitune_core._strategies:OneBackendStrategy", "One backend, or fail."
    ),
)
_CORE: Final = "aitune-core"
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


@attrs.frozen
class _Source:
    """Where a reference comes from."""

    reference: Any
    plugin: str
    distribution: str
    version: str


def _built_in(
    references: Sequence[BackendReference | StrategyReference],
) -> dict[str, list[_Source]]:
    version = distribution_version(_CORE)
    return {
        reference.name: [_Source(reference, "aitune_core", _CORE, version)]
        for reference in references
    }


class PluginRegistry:
    """What the core brings, and the plugins of one set of entry points.

    Args:
        entry_points: The entry points to load; None means those installed in group ``aitune``.
    """

    def __init__(self, entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        self.manager = pluggy.PluginManager(PROJECT_NAME)
        self.manager.add_hookspecs(HookSpecs)
        #: Why a plugin is missing, one error per entry point.
        self.failures: list[PluginLoadError] = []
        self._backends = _built_in(_BACKENDS)
        self._strategies = _built_in(_STRATEGIES)
        found = metadata.entry_points(group=PROJECT_NAME) if entry_points is None else entry_points
        for entry_point in sorted(found, key=lambda entry: (entry.name, entry.value)):
            self._load(entry_point)

    def _load(self, entry_point: metadata.EntryPoint) -> None:
        distribution, version = _origin(entry_point)
        try:
            plugin = entry_point.load()
            self._check_plugin(plugin)
            self.manager.register(plugin, name=f"{distribution}:{entry_point.name}")
            self.manager.check_pending()
            self._collect(plugin, entry_point.name, distribution, version)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a plugin may even raise SystemExit on import
            if self.manager.has_plugin(f"{distribution}:{entry_point.name}"):
                self.manager.unregister(name=f"{distribution}:{entry_point.name}")
            msg = (
                f"plugin {entry_point.name!r} of {distribution} {version} could not be loaded: "
                f"{type(error).__name__}: {error}"
            )
            failure = PluginLoadError(msg, plugin=entry_point.name, distribution=distribution)
            failure.__cause__ = error
            self.failures.append(failure)
            warnings.warn(msg, PluginLoadWarning, stacklevel=2)

    @staticmethod
    def _check_plugin(plugin: object) -> None:
        version = getattr(plugin, "AITUNE_API_VERSION", None)
        if version != API_VERSION:
            msg = (
                f"it was written for plugin API {version}, this aitune-core has {API_VERSION}; "
                "install matching versions"
            )
            raise PluginLoadError(msg)

    def _collect(self, plugin: object, name: str, distribution: str, version: str) -> None:
        for hook, kind, table in (
            ("aitune_register_backends", BackendReference, self._backends),
            ("aitune_register_strategies", StrategyReference, self._strategies),
        ):
            implementation = getattr(plugin, hook, None)
            references = [] if implementation is None else list(implementation())
            for reference in references:
                if not isinstance(reference, kind):
                    msg = f"{hook} must return {kind.__name__} objects, got {reference!r}"
                    raise PluginLoadError(msg)
            for reference in references:
                table.setdefault(reference.name, []).append(
                    _Source(reference, name, distribution, version)
                )

    def observers(self) -> pluggy.PluginManager:
        """Return a new manager with the plugins of this registry, for one tuning to extend."""
        manager = pluggy.PluginManager(PROJECT_NAME)
        manager.add_hookspecs(HookSpecs)
        for name, plugin in self.manager.list_name_plugin():
            manager.register(plugin, name=name)
        return manager

    def backend_infos(self) -> tuple[BackendInfo, ...]:
        """Return the registered backends, by name; imports none of them."""
        return tuple(self._info(sources) for _, sources in sorted(self._backends.items()))

    @staticmethod
    def _info(sources: list[_Source]) -> BackendInfo:
        source = sources[0]
        missing = [module for module in source.reference.requires if not _installed(module)]
        reason = f"{', '.join(missing)} not installed" if missing else ""
        if len(sources) > 1:
            reason = "registered by " + " and ".join(each.distribution for each in sources)
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
        return [*sorted(set(self._backends) - {_EAGER, _INDUCTOR}), _INDUCTOR]

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
        source = self._source(self._strategies, name, "strategy", UnknownStrategyError)
        strategy_class = self._import(source, Strategy)  # type: ignore[type-abstract]
        try:
            return strategy_class(**options)
        except TypeError as error:
            msg = (
                f"strategy {name!r} cannot be made from its name with options {sorted(options)}: "
                f"{error}; pass an instance, such as OneBackendStrategy('onnxruntime')"
            )
            raise ConfigError(msg, field="options", value=options) from error

    def _source(
        self,
        table: Mapping[str, list[_Source]],
        name: Any,  # noqa: ANN401 - what the user gave
        kind: str,
        error: type[UnknownBackendError | UnknownStrategyError],
    ) -> _Source:
        sources = table.get(name) if isinstance(name, str) else None
        if not sources:
            known = sorted(table)
            msg = (
                f"unknown {kind} {name!r}; known: {', '.join(known) or 'none'}"
                + _suggestion(str(name), known)
                + self._failure_text()
            )
            raise error(
                msg, plugin=name, known=known, failures=[str(each) for each in self.failures]
            )
        if len(sources) > 1:
            origins = [f"{each.distribution} {each.version}" for each in sources]
            msg = f"{kind} {name!r} is registered by {' and '.join(origins)}; uninstall one of them"
            raise PluginConflictError(msg, plugin=name, distributions=origins)
        return sources[0]

    def _failure_text(self) -> str:
        return "".join(f"\n  not loaded: {failure}" for failure in self.failures)

    @staticmethod
    def _import(source: _Source, base: type[_Class]) -> type[_Class]:
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


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


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


def _origin(entry_point: metadata.EntryPoint) -> tuple[str, str]:
    if entry_point.dist is None:
        return ("an unknown distribution", "")
    return (entry_point.dist.name, entry_point.dist.version)


def distribution_version(distribution: str) -> str:
    """Return the version of an installed distribution; empty where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


@functools.lru_cache(maxsize=1)
def default_registry() -> PluginRegistry:
    """Return the registry of the installed plugins, made once.

    ``default_registry.cache_clear()`` makes the next call look again.
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
