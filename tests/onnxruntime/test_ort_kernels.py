"""Operators of which kernels of ONNX Runtime are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from aitune_backend_onnxruntime.kernels import right_kernels

VALUES = np.array(
    [[2**31, -(2**31) - 5, 1, 2**32], [2**31 + 1, 0, -3, 2**50 + 7], [-1, -(2**33), -9, -(2**31)]]
)
SIZES: list[Any] = ["rows", 4]


def _model(
    operator: str, *constants: Any, opset: int = 20, dtype: Any = np.int64, **attributes: Any
) -> onnx.ModelProto:
    names = ["" if value is None else f"constant_{place}" for place, value in enumerate(constants)]
    node = helper.make_node(operator, ["x", *names], ["y"], **attributes)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [node],
        "integers",
        [helper.make_tensor_value_info("x", kind, SIZES)],
        [helper.make_tensor_value_info("y", kind, None)],
        [
            numpy_helper.from_array(np.array(value, dtype), name)
            for name, value in zip(names, constants, strict=True)
            if name
        ],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
    (result,) = session.run(None, {"x": x})
    return np.asarray(result)


@pytest.mark.parametrize("x", [VALUES, np.abs(VALUES) + 2**31, -np.abs(VALUES), VALUES[:1]])
@pytest.mark.parametrize(
    ("model", "function"),
    [
        (_model("Sign"), np.sign),
        (_model("Max", [5, 2**31 + 2, 0, -1]), lambda x: np.maximum(x, [5, 2**31 + 2, 0, -1])),
        (_model("Min", [5], [2**40]), lambda x: np.minimum(x, 5)),
        (_model("Clip", 3, 2**32 + 4), lambda x: x.clip(3, 2**32 + 4)),
        (_model("Clip", 3), lambda x: x.clip(3)),
        (_model("Clip", 7, 3), lambda x: np.minimum(np.maximum(x, 7), 3)),
        (_model("ReduceMax", keepdims=0), lambda x: x.max()),
        (_model("ReduceMin", keepdims=0), lambda x: x.min()),
        (_model("ReduceMax", [1]), lambda x: x.max(1, keepdims=True)),
        (_model("ReduceMin", [-1, 0], keepdims=0), lambda x: x.min()),
        (_model("ReduceMax", [0], keepdims=0), lambda x: x.max(0)),
        (_model("ReduceMin", opset=17, axes=[1], keepdims=0), lambda x: x.min(1)),
    ],
)
def test_values_beyond_32_bits(
    model: onnx.ModelProto, function: Callable[[np.ndarray], np.ndarray], x: np.ndarray
) -> None:
    right = right_kernels(model)
    onnx.checker.check_model(right, full_check=True)
    assert np.array_equal(_run(right, x), function(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(
    ("operator", "constants", "function"),
    [
        ("Clip", (None, 2), lambda x: np.minimum(x, 2)),
        ("Clip", (-1,), lambda x: np.maximum(x, -1)),
        ("Clip", (), lambda x: x),
        ("Clip", (-1, 2), lambda x: x.clip(-1, 2)),
        ("Sign", (), lambda x: np.nan_to_num(np.sign(x))),
    ],
)
def test_infinities_and_no_numbers(
    operator: str, constants: Any, function: Callable[[np.ndarray], np.ndarray], dtype: Any
) -> None:
    x = np.array([[1, np.inf, -np.inf, np.nan], [0, -0.0, 3, -3]], dtype)
    right = right_kernels(_model(operator, *constants, dtype=dtype))
    np.testing.assert_array_equal(_run(right, x), function(x))


def test_kernels_of_onnxruntime_are_still_wrong() -> None:
    """Shows that the module under test is needed: it can go when this fails."""
    assert not np.array_equal(_run(_model("Sign"), VALUES), np.sign(VALUES))
    clip, infinite = _model("Clip", 0, dtype=np.float32), np.full((1, 4), np.inf, np.float32)
    assert not np.array_equal(_run(clip, infinite), infinite)


def test_sizes_and_floats_are_left_alone() -> None:
    size = helper.make_node("Shape", ["x"], ["size"])
    capped = helper.make_node("Min", ["size", "limit"], ["y"])
    largest = helper.make_node("ReduceMax", ["f"], ["z"])
    graph = helper.make_graph(
        [size, capped, largest],
        "sizes",
        [
            helper.make_tensor_value_info("x", TensorProto.INT64, SIZES),
            helper.make_tensor_value_info("f", TensorProto.FLOAT, SIZES),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.INT64, [2]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 1]),
        ],
        [numpy_helper.from_array(np.array([3]), "limit")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    assert right_kernels(model) is model


def test_types_that_the_model_does_not_state_are_inferred() -> None:
    model = _model("Sign")
    double = helper.make_node("Add", ["x", "x"], ["twice"])
    model.graph.node.insert(0, double)
    model.graph.node[1].input[0] = "twice"
    assert np.array_equal(_run(right_kernels(model), VALUES), np.sign(VALUES))


def test_constants_in_another_file_are_not_read(tmp_path: Path) -> None:
    limits = np.arange(400).reshape(100, 4)
    path = tmp_path / "model.onnx"
    onnx.save_model(
        _model("Max", limits),
        path,
        save_as_external_data=True,
        location="weights",
        size_threshold=9,
    )
    right = right_kernels(onnx.load(path, load_external_data=False))
    onnx.load_external_data_for_model(right, str(tmp_path))
    assert np.array_equal(_run(right, VALUES[:1]), np.maximum(VALUES[:1], limits))
