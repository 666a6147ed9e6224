"""Configuration of the ONNX Runtime backend."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs
import torch

from aitune_core.config import BackendConfig
from aitune_core.errors import ConfigError

__all__ = [
    "DYNAMO_OPSETS",
    "ISOLATE_SECONDS",
    "TRACER_OPSETS",
    "CudaGraphs",
    "ONNXExecutionProvider",
    "ONNXRuntimeBackendConfig",
    "Precision",
]

CudaGraphs: TypeAlias = Literal["auto"] | bool

#: In which a session must be created and run once: TensorRT takes minutes for large models.
ISOLATE_SECONDS: Final = 600.0
#: Opsets of the dynamo exporter: it writes none below 18, ONNX Runtime 1.31 reads none above 26.
DYNAMO_OPSETS: Final = range(18, 27)
#: Opsets of the tracer (``torch.onnx.export(dynamo=False)``).
TRACER_OPSETS: Final = range(9, 21)


class ONNXExecutionProvider(enum.StrEnum):
    """What executes the graph."""

    CUDA = "cuda"
    TENSORRT = "tensorrt"
    CPU = "cpu"

    @property
    def ort_name(self) -> str:
        """ONNX Runtime's name, such as ``"CUDAExecutionProvider"``."""
        return _ORT_NAMES[self.value]

    @property
    def device_type(self) -> str:
        """Kind of device that it runs on: ``"cpu"`` or ``"cuda"``."""
        return "cpu" if self is ONNXExecutionProvider.CPU else "cuda"


_ORT_NAMES: Final = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "cpu": "CPUExecutionProvider",
}


class Precision(enum.StrEnum):
    """Half precision in which a float32 module is computed."""

    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """Torch's element type."""
        return torch.float16 if self is Precision.FP16 else torch.bfloat16


def _precision(value: object) -> Precision | None:
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in set(Precision):
        return Precision(value.lower())
    allowed = tuple(precision.value for precision in Precision)
    msg = f"precision must be one of {', '.join(allowed)} or None, got {value!r}"
    raise ConfigError(msg, field="precision", value=value, allowed=allowed)


def _check_parts(
    config: ONNXRuntimeBackendConfig, attribute: attrs.Attribute[Any], value: object
) -> None:
    names = isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)
    if not names:
        msg = f"{attribute.name} must be names of parts of the module, got {value!r}"
        raise ConfigError(msg, field=attribute.name, value=value, allowed="names of parts")
    if value and config.precision is None:
        msg = f"{attribute.name} is for a precision, got {value!r} without; set precision, too"
        raise ConfigError(msg, field=attribute.name, value=value, allowed=())


def _names(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else value


def _provider(value: object) -> ONNXExecutionProvider | None:
    if value is None:
        return None
    if isinstance(value, str):
        for provider in ONNXExecutionProvider:
            if value.lower() in {provider.value, provider.ort_name.lower()}:
                return provider
    allowed = tuple(provider.value for provider in ONNXExecutionProvider)
    msg = f"execution_provider must be one of {', '.join(allowed)} or None, got {value!r}"
    raise ConfigError(msg, field="execution_provider", value=value, allowed=allowed)


def _check_bool(_config: object, attribute: attrs.Attribute[bool], value: object) -> None:
    if not isinstance(value, bool):
        msg = f"{attribute.name} must be True or False, got {value!r}"
        raise ConfigError(msg, field=attribute.name, value=value, allowed=(True, False))


def _check_opset(
    config: ONNXRuntimeBackendConfig, _attribute: attrs.Attribute[int | None], value: object
) -> None:
    exporter, opsets = (
        ("dynamo exporter", DYNAMO_OPSETS) if config.use_dynamo else ("tracer", TRACER_OPSETS)
    )
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (is_integer and value in opsets):
        return
    allowed = f"an integer from {opsets[0]} to {opsets[-1]}, or None"
    msg = f"opset_version must be {allowed} with the {exporter}, got {value!r}"
    raise ConfigError(msg, field="opset_version", value=value, allowed=allowed)


def _check_graphs(_config: object, attribute: attrs.Attribute[CudaGraphs], value: object) -> None:
    if not (isinstance(value, bool) or value == "auto"):
        allowed = ("auto", True, False)
        msg = f"{attribute.name} must be 'auto', True or False, got {value!r}"
        raise ConfigError(msg, field=attribute.name, value=value, allowed=allowed)


def _check_seconds(_config: object, attribute: attrs.Attribute[float], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        msg = f"{attribute.name} must be a positive number of seconds, got {value!r}"
        raise ConfigError(msg, field=attribute.name, value=value, allowed="seconds above 0")


@attrs.frozen(kw_only=True, init=False)
class ONNXRuntimeBackendConfig(BackendConfig):
    """Settings of `ONNXRuntimeBackend`.

    Args:
        use_dynamo: Export with ``torch.export``; the tracer is then only a last resort. False
            uses the tracer alone.
        execution_provider: What executes the graph; None means CUDA on a CUDA device and CPU on
            the CPU. Accepts the enum, its value, or ONNX Runtime's name, in any case.
        opset_version: ONNX opset to export; None means the best known for the exporter.
        cuda_graphs: Whether calls on CUDA are captured once per tuple of input shapes, and then
            replayed. ``"auto"``: for recorded sizes at tuning and loading, for other sizes that
            come again while the process has one thread, and not where a replay would do something
            else. True: for every size, at its first call, in any thread; where it cannot be, that
            is an error (a call while another engine is being created runs plainly). While a
            capture goes on, some milliseconds, `torch.cuda.synchronize` fails in other threads: a
            limit of CUDA. The provider TensorRT runs without.
        precision: Half precision to compute in: ``"fp16"`` or ``"bf16"``. Weights of float32 are
            cast in a copy of the module, inputs and outputs keep their types, and the numeric
            check allows what that precision rounds. None leaves the module as it is.
        float32_parts: Names of parts, as in ``named_modules()``, that stay in float32, such as
            those that overflow.
        isolate: Whether a session is first created and run once in a process of its own, with a
            recorded call. One that crashes, hangs or runs out of memory there costs its candidate
            instead of this process. Costs about a second per exported model, some on CUDA, where
            the device must allow several processes. Finished builds that are loaded go without.
        isolate_seconds: How long that may take; never longer than the build may.

    Raises:
        ConfigError: A name is unknown or a value cannot be used.
    """

    use_dynamo: bool = attrs.field(default=True, validator=_check_bool)
    execution_provider: ONNXExecutionProvider | None = attrs.field(
        default=None, converter=_provider
    )
    opset_version: int | None = attrs.field(default=None, validator=_check_opset)
    cuda_graphs: CudaGraphs = attrs.field(default="auto", validator=_check_graphs)
    precision: Precision | None = attrs.field(default=None, converter=_precision)
    float32_parts: tuple[str, ...] = attrs.field(
        default=(), converter=_names, validator=_check_parts
    )
    isolate: bool = attrs.field(default=True, validator=_check_bool)
    isolate_seconds: float = attrs.field(default=ISOLATE_SECONDS, validator=_check_seconds)

    def __init__(  # noqa: PLR0913 - all by keyword
        self,
        *,
        use_dynamo: bool = True,
        execution_provider: ONNXExecutionProvider | str | None = None,
        opset_version: int | None = None,
        cuda_graphs: CudaGraphs = "auto",
        precision: Precision | str | None = None,
        float32_parts: Sequence[str] = (),
        isolate: bool = True,
        isolate_seconds: float = ISOLATE_SECONDS,
        **unknown: Any,  # noqa: ANN401 - only named in the error
    ) -> None:
        for name, value in unknown.items():
            allowed = tuple(attribute.name for attribute in attrs.fields(type(self)))
            msg = f"{type(self).__name__} has no option {name!r}; its options are: "
            msg += ", ".join(allowed)
            raise ConfigError(msg, field=name, value=value, allowed=allowed)
        self.__attrs_init__(
            use_dynamo=use_dynamo,
            execution_provider=execution_provider,
            opset_version=opset_version,
            cuda_graphs=cuda_graphs,
            precision=precision,
            float32_parts=float32_parts,
            isolate=isolate,
            isolate_seconds=isolate_seconds,
        )
