"""Element types: each one of the table goes through a real session and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from aitune_backend_onnxruntime.binding import CpuRunner
from aitune_backend_onnxruntime.dtypes import ONNX_TYPES, dtype_of, onnx_type
from aitune_backend_onnxruntime.errors import UnsupportedDtypeError
from aitune_core.specs import DynamicDim, GraphSpec, TensorSpec


def identity_runner(dtype: torch.dtype, path: Path) -> CpuRunner:
    number = ONNX_TYPES[dtype]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Identity", ["t0"], ["o0"])],
            "identity",
            [onnx.helper.make_tensor_value_info("t0", number, ["n"])],
            [onnx.helper.make_tensor_value_info("o0", number, ["n"])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 23)],
        ir_version=10,
    )
    onnx.save(model, path)

    shape: Any = [DynamicDim("n", 0, 9)]

    def spec(name: str) -> TensorSpec:
        return TensorSpec(name=name, path=name, dtype=dtype, shape=shape)

    graph = GraphSpec(
        name="identity",
        inputs=(spec("t0"),),
        outputs=(spec("o0"),),
        call_structure=(("*",),),
        result_structure=("*",),
    )
    return CpuRunner(onnxruntime.InferenceSession(str(path)), graph)


def bytes_like(dtype: torch.dtype, count: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(1, count * size + 1, dtype=torch.uint8)
    return (raw % 2).view(dtype) if dtype is torch.bool else raw.view(dtype)


@pytest.mark.parametrize("dtype", ONNX_TYPES, ids=str)
@pytest.mark.parametrize("bound", ["before", "by-runtime"])
def test_every_type_passes_a_session_bit_by_bit(
    dtype: torch.dtype, bound: str, tmp_path: Path
) -> None:
    runner = identity_runner(dtype, tmp_path / "m.onnx")
    if bound == "by-runtime":
        runner._unpredictable = frozenset({0})
    value = bytes_like(dtype, 6)
    (result,) = runner.run([value])
    assert result.dtype is dtype
    assert torch.equal(result.view(torch.uint8), value.view(torch.uint8))
    assert result.data_ptr() != value.data_ptr()
    (empty,) = runner.run([value[:0]])
    assert empty.shape == (0,)
    assert empty.dtype is dtype


@pytest.mark.parametrize("dtype", ONNX_TYPES, ids=str)
def test_number_is_onnxs_own(dtype: torch.dtype) -> None:
    name = onnx.TensorProto.DataType.Name(onnx_type(dtype, "x"))
    ours = str(dtype).removeprefix("torch.")
    assert ours.replace("_", "").lower() == {
        "FLOAT": "float32",
        "DOUBLE": "float64",
    }.get(name, name.lower())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.qint8, torch.complex32])
def test_other_types_are_refused_with_name_and_place(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedDtypeError) as caught:
        onnx_type(dtype, "inputs['z']")
    assert caught.value.dtype == str(dtype).removeprefix("torch.")
    assert caught.value.path == "inputs['z']"
    assert "inputs['z']" in str(caught.value)


def test_unknown_number_is_still_named() -> None:
    assert dtype_of(16) == "bfloat16"
    assert "99" in dtype_of(99)


class Complex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_build_refuses_complex_before_exporting(case: Callable[..., Any]) -> None:
    made = case(Complex(), torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedDtypeError) as caught:
        made.build()
    assert caught.value.path == "t[0]"
    assert made.attempts == []
