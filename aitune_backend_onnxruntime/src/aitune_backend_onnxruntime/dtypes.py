"""The only table between torch's and ONNX's element types."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from aitune_backend_onnxruntime.errors import UnsupportedDtypeError
from aitune_core.specs import TensorSpec, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["ONNX_TYPES", "check_dtypes", "dtype_of", "onnx_type"]

#: ``onnx.TensorProto.DataType`` of each torch dtype that ONNX Runtime binds by address.
#:
#: Source: onnx.proto, ``TensorProto.DataType``; the numbers are part of the format.
ONNX_TYPES: Final[Mapping[torch.dtype, int]] = MappingProxyType(
    {
        torch.float32: 1,
        torch.uint8: 2,
        torch.int8: 3,
        torch.uint16: 4,
        torch.int16: 5,
        torch.int32: 6,
        torch.int64: 7,
        torch.bool: 9,
        torch.float16: 10,
        torch.float64: 11,
        torch.uint32: 12,
        torch.uint64: 13,
        torch.bfloat16: 16,
        torch.float8_e4m3fn: 17,
        torch.float8_e4m3fnuz: 18,
        torch.float8_e5m2: 19,
        torch.float8_e5m2fnuz: 20,
    }
)


def onnx_type(dtype: torch.dtype, path: str) -> int:
    """Return the ``TensorProto.DataType`` of a torch dtype.

    Args:
        dtype: Element type.
        path: Where the tensor is, for the error.

    Raises:
        UnsupportedDtypeError: ONNX Runtime cannot take this type, such as complex or quantised.
    """
    number = ONNX_TYPES.get(dtype)
    if number is None:
        name = dtype_name(dtype)
        msg = (
            f"{path!r} has dtype {name}, which ONNX Runtime cannot take; "
            f"supported: {', '.join(map(dtype_name, ONNX_TYPES))}"
        )
        raise UnsupportedDtypeError(msg, dtype=name, path=path)
    return number


def dtype_of(number: int) -> str:
    """Return the name of a ``TensorProto.DataType``, such as ``"bfloat16"``."""
    for dtype, known in ONNX_TYPES.items():
        if known == number:
            return dtype_name(dtype)
    return f"ONNX type {number}"


def check_dtypes(specs: Iterable[TensorSpec]) -> None:
    """Check that every tensor has an element type that ONNX Runtime can take.

    Raises:
        UnsupportedDtypeError: One has not.
    """
    for spec in specs:
        onnx_type(spec.dtype, spec.path)
