"""What an engine tells the report: where nodes run, what is copied, and whose it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import aitune_core as ait
from aitune_backend_onnxruntime.backend import ONNXRuntimeBackend
from aitune_backend_onnxruntime.engine_tables import Copies, copies_in, copies_table
from aitune_backend_onnxruntime.model_file import facts_of
from aitune_core.errors import CheckpointFormatError

MakeCase = Callable[..., Any]
CPU = torch.device("cpu")
PROVIDER = "CPUExecutionProvider"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Net(nn.Module):
    """Has parts in a list, a part of a part, and an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(5)])
        self.head = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.sin(self.head(x))


EXPECTED = {
    ("Relu", 5, "blocks.0, blocks.1, blocks.2 and 2 more"),
    ("Tanh", 1, "head.1"),
    ("Sin", 1, "the module itself"),
}


def rows_of(engine: Any) -> set[tuple[Any, ...]]:
    (table,) = engine.tables()
    assert table.columns == ("provider", "operator", "nodes", "parts of the module")
    assert {row[0] for row in table.rows} == {PROVIDER}
    return {row[1:] for row in table.rows}


@pytest.mark.parametrize("options", [{}, {"use_dynamo": False}, {"precision": "fp16"}], ids=str)
def test_nodes_are_counted_with_their_parts(case: MakeCase, options: dict[str, Any]) -> None:
    engine = case(Net(), torch.randn(2, 4), tolerance=1e-2).build(**options)
    rows = rows_of(engine)
    assert rows >= EXPECTED
    counted = [row for row in rows if row[0] != "all"]
    assert ("all", sum(row[1] for row in counted), "") in rows
    products = [row for row in counted if row[0] in {"Gemm", "MatMul"}]
    assert sum(row[1] for row in products) == 6
    assert any("blocks.0.linear" in row[2] for row in products)


def test_restored_engine_tells_the_same(case: MakeCase, stored_in: Callable[..., Any]) -> None:
    engine = case(Net(), torch.randn(2, 4)).build()
    again = ONNXRuntimeBackend().load(stored_in(engine, "elsewhere"), engine.graph, CPU)
    assert again.tables() == engine.tables()


def test_report_of_a_tuning_has_the_table() -> None:
    report = ait.tune(
        ait.Module(Net().eval()),
        [torch.randn(2, 4)],
        strategy=ait.OneBackendStrategy(("onnxruntime", {"isolate": False})),
        reuse_builds=False,
    )
    (table,) = report.modules[0].graphs[0].candidates[0].tables
    assert {row[1:] for row in table.rows} >= EXPECTED


def test_model_file_keeps_names_of_parts_and_no_more(case: MakeCase) -> None:
    engine = case(Net(), torch.randn(2, 4)).build()
    model = onnx.load(engine.model.path)
    noted = [entry for node in model.graph.node for entry in node.metadata_props]
    assert {entry.key for entry in noted} == {"aitune.part"}
    assert "blocks.0.linear" in {entry.value for entry in noted}
    assert "Block" not in str(model.graph.node)


def node(operator: str, name: str, inputs: list[str], outputs: list[str], part: str | None) -> Any:
    made = helper.make_node(operator, inputs, outputs, name=name)
    if part is not None:
        made.metadata_props.add(key="aitune.part", value=part)
    return made


def model_of(*nodes: Any) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    return helper.make_model(helper.make_graph(list(nodes), "graph", [x], [y]))


def test_copies_are_traced_to_parts() -> None:
    source = model_of(
        node("Unique", "unique", ["x"], ["u"], "encoder.seen"),
        node("Relu", "relu", ["u"], ["r"], "head"),
        node("Sin", "sin", ["r"], ["y"], ""),
    )
    # As ONNX Runtime writes it: fused nodes and copies have names of its own.
    optimized = model_of(
        node("MemcpyToHost", "Memcpy", ["x"], ["x_host"], None),
        node("Unique", "unique", ["x_host"], ["u"], None),
        node("MemcpyFromHost", "Memcpy_token_1", ["u"], ["u_cuda"], None),
        node("Fused", "fused", ["u_cuda"], ["f"], None),
        node("MemcpyToHost", "Memcpy_token_2", ["f"], ["f_host"], None),
        node("Sin", "sin", ["f_host"], ["s"], None),
        node("MemcpyFromHost", "Memcpy_token_3", ["s"], ["y"], None),
    )
    assert set(copies_in(optimized, facts_of(source))) == {
        # An input has no part, but what uses it; a fused node has none, but what it was made of.
        Copies("to the CPU", "encoder.seen", 2),
        Copies("to the GPU", "encoder.seen", 1),
        Copies("to the GPU", "the module itself", 1),
    }


def test_copies_in_branches_are_found() -> None:
    inner = model_of(node("MemcpyFromHost", "Memcpy", ["c"], ["y"], None)).graph
    outer = node("If", "if", ["x"], ["y"], None)
    outer.attribute.append(helper.make_attribute("then_branch", inner))
    source = model_of(node("Relu", "relu", ["x"], ["c"], "gate"))
    assert copies_in(model_of(outer), facts_of(source)) == (Copies("to the GPU", "gate", 1),)


def test_what_is_not_known_of_copies_is_said() -> None:
    assert copies_table(None).rows[0][0] == "unknown"
    assert copies_table(()).rows == (("none", "", 0),)
    assert copies_table((Copies("to the GPU", "head", 2),)).rows == (("to the GPU", "head", 2),)


def test_stored_copies_come_back(case: MakeCase, stored_in: Callable[..., Any]) -> None:
    engine = case(Net(), torch.randn(2, 4)).build()
    artifacts = stored_in(engine, "elsewhere")
    assert artifacts.data["copies"] is None
    data = {**artifacts.data, "copies": [["to the GPU", "head", 2]]}
    again: Any = ONNXRuntimeBackend().load(attrs.evolve(artifacts, data=data), engine.graph, CPU)
    assert again.copies == (Copies("to the GPU", "head", 2),)


@pytest.mark.parametrize("value", [3, "none", [3], [["to the GPU", "head"]], [["a", "b", True]]])
def test_stored_copies_of_another_form_are_refused(
    case: MakeCase, stored_in: Callable[..., Any], value: object
) -> None:
    engine = case(nn.Linear(3, 4), torch.randn(2, 3)).build()
    artifacts = stored_in(engine, "elsewhere")
    changed = attrs.evolve(artifacts, data={**artifacts.data, "copies": value})
    with pytest.raises(CheckpointFormatError, match="copies between devices"):
        ONNXRuntimeBackend().load(changed, engine.graph, CPU)
