"""Errors of the ONNX Runtime backend; all of them are aitune errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aitune_core.errors import BackendError, BackendUnavailableError, BuildError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "BACKEND_NAME",
    "EngineRunError",
    "OnnxExportError",
    "ProviderPlacementError",
    "ProviderUnavailableError",
    "SessionTrialError",
    "UnsupportedDtypeError",
]

#: Name under which this backend is registered and stored in checkpoints.
BACKEND_NAME: Final = "onnxruntime"


class OnnxExportError(BuildError):
    """The module could not be exported to ONNX. The exporter's own error is the cause.

    Attributes:
        exporter: ``"dynamo"`` or ``"tracer"``.
        hint: What to try next.
    """

    def __init__(
        self,
        message: str,
        *,
        backend_name: str | None = BACKEND_NAME,
        step: str | None = "export",
        exporter: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, backend_name=backend_name, step=step)
        self.exporter = exporter
        self.hint = hint


class UnsupportedDtypeError(BuildError):
    """A tensor of the graph has an element type that ONNX Runtime cannot take.

    Attributes:
        dtype: Name of the element type, such as ``"complex64"``.
        path: Where the tensor is, such as ``"x[0]"``.
    """

    def __init__(
        self,
        message: str,
        *,
        backend_name: str | None = BACKEND_NAME,
        step: str | None = "dtypes",
        dtype: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(message, backend_name=backend_name, step=step)
        self.dtype = dtype
        self.path = path


class ProviderPlacementError(BuildError):
    """Operators that carry the computation landed on another provider than the one asked for.

    Attributes:
        provider: ONNX Runtime's name of the provider that was asked for.
        operators: Number of misplaced nodes per operator, such as ``{"GridSample": 2}``.
    """

    def __init__(
        self,
        message: str,
        *,
        backend_name: str | None = BACKEND_NAME,
        step: str | None = "placement",
        provider: str | None = None,
        operators: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message, backend_name=backend_name, step=step)
        self.provider = provider
        self.operators = dict(operators or {})


class SessionTrialError(BuildError):
    """A session did not survive its first creation and run, in a process of its own.

    Attributes:
        stage: How far it came: ``"starting"``, ``"loading"``, ``"creating"`` or ``"running"``.
        reason: Name of the signal that ended it such as ``"SIGSEGV"``, or ``"memory"``, ``"time"``
            or ``"exit"``.
    """

    def __init__(
        self,
        message: str,
        *,
        backend_name: str | None = BACKEND_NAME,
        step: str | None = "session",
        stage: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, backend_name=backend_name, step=step)
        self.stage = stage
        self.reason = reason


class ProviderUnavailableError(BackendUnavailableError):
    """An execution provider cannot be used here.

    Attributes:
        provider: ONNX Runtime's name of the provider, such as ``"TensorrtExecutionProvider"``.
        available: The providers that can be used here, by ONNX Runtime's names.
    """

    def __init__(  # noqa: PLR0913 - all but one by keyword
        self,
        message: str,
        *,
        backend_name: str | None = BACKEND_NAME,
        missing: str | None = None,
        install_hint: str | None = None,
        provider: str | None = None,
        available: Sequence[str] = (),
    ) -> None:
        super().__init__(
            message, backend_name=backend_name, missing=missing, install_hint=install_hint
        )
        self.provider = provider
        self.available = tuple(available)


class EngineRunError(BackendError):
    """ONNX Runtime failed while it ran a graph. Its own error is the cause."""

    def __init__(self, message: str, *, backend_name: str | None = BACKEND_NAME) -> None:
        super().__init__(message, backend_name=backend_name)
