"""Errors and warnings of aitune.

Every error keeps the facts of its message as attributes, so that callers and tests read
attributes instead of prose. Facts are keyword arguments with a default, which keeps every
error picklable: the message alone rebuilds it and the attributes travel in ``__dict__``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

__all__ = [
    "AituneError",
    "AituneWarning",
    "BackendError",
    "BackendUnavailableError",
    "BuildError",
    "CallFormError",
    "CandidateRejectedError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointIntegrityError",
    "ConfigError",
    "EngineClosedError",
    "InputMismatchError",
    "MissWarning",
    "MissingExtraError",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "PluginLoadWarning",
    "RecordingError",
    "ReportError",
    "TuningError",
    "UnknownBackendError",
    "UnknownStrategyError",
    "ValidationError",
]


class AituneError(Exception):
    """Base of every error that aitune and its plugins raise on purpose."""


class ConfigError(AituneError, ValueError):
    """A setting has a name, a type or a value that cannot be used.

    Attributes:
        field: Name of the setting.
        value: What was given.
        allowed: What would have been accepted, in words or as a sequence of values.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        allowed: object = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.allowed = allowed


class PluginError(AituneError):
    """A plugin could not be found, loaded or told apart from another one.

    Attributes:
        plugin: Name of the plugin (its entry point) or of what was asked for.
        distribution: Installed distribution that provides it, where known.
    """

    def __init__(
        self, message: str, *, plugin: str | None = None, distribution: str | None = None
    ) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.distribution = distribution


class PluginLoadError(PluginError):
    """A plugin, or a class that it names, could not be imported."""


class PluginConflictError(PluginError):
    """Two plugins register the same name.

    Attributes:
        distributions: The distributions that both claim the name.
    """

    def __init__(
        self,
        message: str,
        *,
        plugin: str | None = None,
        distribution: str | None = None,
        distributions: Sequence[str] = (),
    ) -> None:
        super().__init__(message, plugin=plugin, distribution=distribution)
        self.distributions = tuple(distributions)


class _UnknownNameError(PluginError, LookupError):
    """A name that no plugin registered.

    Attributes:
        known: Names that are registered.
        failures: Messages of the plugins that could not be loaded.
    """

    def __init__(
        self,
        message: str,
        *,
        plugin: str | None = None,
        distribution: str | None = None,
        known: Sequence[str] = (),
        failures: Sequence[str] = (),
    ) -> None:
        super().__init__(message, plugin=plugin, distribution=distribution)
        self.known = tuple(known)
        self.failures = tuple(failures)


class UnknownBackendError(_UnknownNameError):
    """No plugin registered a backend of this name."""


class UnknownStrategyError(_UnknownNameError):
    """No plugin registered a strategy of this name."""


class BackendError(AituneError):
    """A backend could not do what it was asked to do.

    Attributes:
        backend_name: Name of the backend.
    """

    def __init__(self, message: str, *, backend_name: str | None = None) -> None:
        super().__init__(message)
        self.backend_name = backend_name


class BackendUnavailableError(BackendError):
    """A backend cannot run here: a package, provider or device is missing.

    Attributes:
        missing: The package, library or device that is missing.
        install_hint: A command or step that repairs it.
    """

    def __init__(
        self,
        message: str,
        *,
        backend_name: str | None = None,
        missing: str | None = None,
        install_hint: str | None = None,
    ) -> None:
        super().__init__(message, backend_name=backend_name)
        self.missing = missing
        self.install_hint = install_hint


class BuildError(BackendError):
    """A backend failed to build an engine for one graph.

    Attributes:
        step: The step that failed, such as ``"export"`` or ``"session"``.
    """

    def __init__(
        self, message: str, *, backend_name: str | None = None, step: str | None = None
    ) -> None:
        super().__init__(message, backend_name=backend_name)
        self.step = step


class EngineClosedError(BackendError, RuntimeError):
    """An engine was used after `Engine.close`.

    Attributes:
        operation: What was attempted.
    """

    def __init__(
        self, message: str, *, backend_name: str | None = None, operation: str | None = None
    ) -> None:
        super().__init__(message, backend_name=backend_name)
        self.operation = operation


class ValidationError(AituneError):
    """An engine's outputs differ from eager.

    Attributes:
        output: Path of the worst output, such as ``"out['logits']"``.
        kind: What differs: ``"values"``, ``"dtype"``, ``"shape"``, ``"device"``, ``"count"``,
            ``"nonfinite"``, ``"input"`` (the engine wrote into one), ``"grad"``, ``"execution"``
            ``"sizes"`` (the engine does not take a declared range), ``"structure"`` (what is
            not a tensor in a result), ``"overwritten"`` (a later call changed results) or
            ``"aliasing"`` (results share memory with what lives on).
        index: Place of the worst element, where values differ.
        worst_difference: Largest absolute difference, where values differ.
        expected: Eager's value, dtype, shape or count.
        got: The engine's.
        case: Which input shows it, such as ``"recorded call 2"``.
    """

    def __init__(  # noqa: PLR0913
        self,
        message: str,
        *,
        output: str | None = None,
        kind: str | None = None,
        index: tuple[int, ...] | None = None,
        worst_difference: float | None = None,
        expected: object = None,
        got: object = None,
        case: str | None = None,
    ) -> None:
        super().__init__(message)
        self.output = output
        self.kind = kind
        self.index = index
        self.worst_difference = worst_difference
        self.expected = expected
        self.got = got
        self.case = case


class CandidateRejectedError(BackendError):
    """A correct engine that does not keep to what the strategy asks for.

    Attributes:
        rule: What it breaks: the name of a limit, such as ``"max_memory_bytes"``, ``"slower"``,
            ``"latency_budget_ms"`` or ``"not tried"``.
        limit: What is allowed.
        got: What it takes.
    """

    def __init__(
        self,
        message: str,
        *,
        backend_name: str | None = None,
        rule: str | None = None,
        limit: object = None,
        got: object = None,
    ) -> None:
        super().__init__(message, backend_name=backend_name)
        self.rule = rule
        self.limit = limit
        self.got = got


class InputMismatchError(AituneError, ValueError):
    """A call's inputs fit no tuned graph, or an engine's inputs do not fit its graph.

    Attributes:
        path: Path of the input in the call, such as ``"input_ids"`` or ``"x[0]"``.
        expected: What the graph accepts.
        got: What was given.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.got = got


class CallFormError(InputMismatchError, TypeError):
    """A call does not fit the signature: an argument is missing, unknown or given twice."""


class RecordingError(AituneError):
    """A module cannot be recorded, or was never called.

    Attributes:
        module_name: Name of the wrapped module.
        path: Path of the argument or output that stands in the way.
    """

    def __init__(
        self, message: str, *, module_name: str | None = None, path: str | None = None
    ) -> None:
        super().__init__(message)
        self.module_name = module_name
        self.path = path


class TuningError(ExceptionGroup[Exception], AituneError):
    """No candidate was good enough. Holds one error per failed candidate."""

    def derive(self, excs: Sequence[Exception], /) -> Self:  # type: ignore[override]
        """Return a group of the same kind around other errors."""
        return type(self)(self.message, excs)


class CheckpointError(AituneError):
    """A checkpoint cannot be written or read.

    Attributes:
        path: The checkpoint file.
        expected: What should be there.
        got: What is there.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.got = got


class CheckpointFormatError(CheckpointError):
    """A file is not a checkpoint, or one of a format that this version cannot read."""


class CheckpointIntegrityError(CheckpointError):
    """A checkpoint's content does not match its manifest."""


class ReportError(AituneError):
    """A report cannot be written or read.

    Attributes:
        path: The file; None where a text is read.
        expected: What should be there.
        got: What is there.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.got = got


class MissingExtraError(AituneError, ImportError):
    """Packages of an optional extra are needed and not installed.

    Attributes:
        extra: Name of the extra, such as ``"report"``.
        missing: The package that could not be imported.
        install_hint: The command that installs it.
    """

    def __init__(
        self,
        message: str,
        *,
        extra: str | None = None,
        missing: str | None = None,
        install_hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.extra = extra
        self.missing = missing
        self.install_hint = install_hint


class AituneWarning(UserWarning):
    """Base of every warning that aitune gives."""


class MissWarning(AituneWarning):
    """A call fitted no tuned graph and ran eagerly."""


class PluginLoadWarning(AituneWarning):
    """An installed plugin could not be loaded; the others work."""
