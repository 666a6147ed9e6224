"""Model files: what they say about themselves, and which must not be opened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from aitune_backend_onnxruntime.model_file import (
    ModelFileError,
    facts_of,
    read_model,
    trusted_path,
)


def external(name: str, location: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def info(name: str, shape: list[str | int | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def branch(name: str, weight: TensorProto | None = None) -> onnx.GraphProto:
    nodes = [helper.make_node("Identity", ["w" if weight else "x"], [name])]
    return helper.make_graph(nodes, name, [], [info(name, None)], [weight] if weight else [])


def model(
    nodes: list[onnx.NodeProto] | None = None, weights: list[TensorProto] | None = None
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes or [helper.make_node("Add", ["x", "w"], ["y"], name="add")],
        "g",
        [info("x", ["n", 4]), info("w", [4])],
        [info("y", ["n", 4])],
        weights if weights is not None else [numpy_helper.from_array(np.ones(4, "f4"), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_facts_leave_weights_out_of_the_inputs() -> None:
    facts = facts_of(model())
    assert [(value.name, value.elem_type, value.shape) for value in facts.inputs] == [
        ("x", 1, (None, 4))
    ]
    assert [value.name for value in facts.outputs] == ["y"]
    assert facts.opset == 23
    assert facts.operators == {"Add": 1}
    assert facts.external_files == ()
    assert facts.results["add"].shape == (None, 4)
    assert not facts.half_convolutions
    assert not facts.float32_products


@pytest.mark.parametrize(
    ("op_type", "elem_type", "expected"),
    [("MatMul", 1, True), ("MatMul", 10, False), ("MatMul", None, True), ("Relu", 1, False)],
)
def test_products_that_may_be_float32_are_noticed(
    op_type: str, elem_type: int | None, *, expected: bool
) -> None:
    node = helper.make_node(op_type, ["x", "w"], ["z"])
    proto = model([node, helper.make_node("Relu", ["z"], ["y"])])
    if elem_type is not None:
        proto.graph.value_info.append(helper.make_tensor_value_info("z", elem_type, ["n", 4]))
    assert facts_of(proto).float32_products is expected


def test_facts_reach_into_branches_and_attributes() -> None:
    nodes = [
        helper.make_node(
            "If",
            ["c"],
            ["y"],
            then_branch=branch("a", external("w", "a.bin")),
            else_branch=branch("b"),
        ),
        helper.make_node("Constant", [], ["k"], value=external("", "b.bin")),
    ]
    facts = facts_of(model(nodes, [external("w", "a.bin"), external("v", "c.bin")]))
    assert facts.operators == {"If": 1, "Identity": 2, "Constant": 1}
    assert facts.external_files == ("a.bin", "c.bin", "b.bin")


def test_model_with_its_own_files_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 16)
    path = saved(model(weights=[external("w", "w.bin")]), tmp_path)
    assert trusted_path(path).external_files == ("w.bin",)
    assert trusted_path(path, {"w.bin": tmp_path / "w.bin"}).external_files == ("w.bin",)


@pytest.mark.parametrize(
    "location", ["../w.bin", "/etc/hostname", "sub/../../w.bin", "missing.bin", "a\\..\\w.bin", ""]
)
def test_model_that_reads_elsewhere_is_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(b"\0" * 16)
    path = saved(model(weights=[external("w", location)]), folder)
    with pytest.raises(ModelFileError, match="not one of its own files"):
        trusted_path(path)


def test_links_and_unlisted_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.bin").write_bytes(b"\0" * 16)
    (tmp_path / "w.bin").symlink_to(tmp_path / "other.bin")
    with pytest.raises(ModelFileError):
        trusted_path(saved(model(weights=[external("w", "w.bin")]), tmp_path))
    path = saved(model(weights=[external("w", "other.bin")]), tmp_path)
    with pytest.raises(ModelFileError):
        trusted_path(path, {"m.onnx": path})


def test_compiled_engine_in_disguise_is_refused(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("EPContext", [], ["e"], domain="com.microsoft")],
        "i",
        [],
        [info("e", None)],
    )
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=branch("b"))]
    with pytest.raises(ModelFileError, match="EPContext"):
        trusted_path(saved(model(nodes), tmp_path))


def test_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(ModelFileError):
        read_model(path)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelFileError):
        read_model(path)
