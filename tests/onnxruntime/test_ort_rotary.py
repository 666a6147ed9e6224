"""Cosines and sines of rotary embeddings get the batch that ONNX Runtime asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from aitune_backend_onnxruntime.rotary import broadcast_rotary_caches

HEADS, LENGTH, HALF = 2, 5, 3


def _model(cache: Sequence[int | str], nodes: int = 1) -> onnx.ModelProto:
    """Return a model of rotary embeddings that share their cosines and sines."""
    full: list[str | int | None] = ["rows", HEADS, LENGTH, 2 * HALF]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, full)
    shape = [*cache, LENGTH, HALF]
    caches = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("c", "s")]
    rotations = [
        helper.make_node("RotaryEmbedding", ["x", "c", "s"], [f"y{number}"])
        for number in range(nodes)
    ]
    results = [
        helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, full)
        for number in range(nodes)
    ]
    graph = helper.make_graph(rotations, "rotary", [x, *caches], results)
    opsets = [helper.make_opsetid("", 23)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _run(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
    results: list[np.ndarray] = session.run(None, inputs)
    return results


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_caches_of_one_row_serve_every_batch(rows: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, HEADS, LENGTH, 2 * HALF)).astype(np.float32)
    angle = random.normal(size=(1, LENGTH, HALF)).astype(np.float32)
    model = _model([1], nodes=2)
    broadcast_rotary_caches(model)
    onnx.checker.check_model(model, full_check=True)
    cosine, sine = np.cos(angle), np.sin(angle)
    one, other = x[..., :HALF], x[..., HALF:]
    expected = np.concatenate([one * cosine - other * sine, one * sine + other * cosine], -1)
    for got in _run(model, {"x": x, "c": cosine, "s": sine}):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_caches_are_expanded_once_for_all_embeddings_of_one_batch() -> None:
    model = _model([1], nodes=3)
    broadcast_rotary_caches(model)
    assert [node.op_type for node in model.graph.node].count("Expand") == 2


def test_caches_that_have_the_batch_stay_as_they_are() -> None:
    model = _model(["rows"])
    before = model.SerializeToString()
    broadcast_rotary_caches(model)
    assert model.SerializeToString() == before
