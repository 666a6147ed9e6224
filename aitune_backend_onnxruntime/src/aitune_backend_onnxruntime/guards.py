"""What an export took for granted about sizes, as conditions on a graph's dims.

An exported program or a trace holds the one path that its sample took. The branches on sizes that
led there are known to the shape environment of the export, but an ONNX model has no place for
them. A trace has no such environment: the module runs once more, on tensors of symbolic sizes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aitune_backend_onnxruntime.recurrent import recurrent_shapes
from aitune_core.symbolic import symbolic_conditions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from aitune_core.conditions import SizeCondition
    from aitune_core.specs import GraphSpec, TensorSpec

__all__ = ["export_conditions", "trace_conditions"]


def export_conditions(program: ExportedProgram, graph: GraphSpec) -> tuple[SizeCondition, ...]:
    """Return the conditions on dims under which an exported program is the module.

    Those that sizes in the ranges of the dims always meet may be among them. Those on values
    inside the graph are not: eager raises where they do not hold.

    Args:
        program: The program; its user inputs are the graph's, in order.
        graph: The graph.

    Raises:
        ValueError: A condition cannot be written as a `SizeCondition`.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [values[str(name)] for name in program.graph_signature.user_inputs]
    return symbolic_conditions(inputs, graph)


def trace_conditions(
    module: nn.Module, inputs: Sequence[Tensor], graph: GraphSpec
) -> tuple[SizeCondition, ...]:
    """Return the conditions on dims under which a trace with these inputs is the module.

    Args:
        module: A copy of it runs, in which tensors have no data.
        inputs: What it is traced with.
        graph: The graph.

    Raises:
        Exception: What the module raises where its Python code needs values, or where it has parts
            that cannot run without data.
    """
    environment = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    state = (*module.parameters(), *module.buffers())
    module = copy.deepcopy(
        module, {id(tensor): mode.from_tensor(tensor, static_shapes=True) for tensor in state}
    )
    with torch.no_grad(), enable_python_dispatcher(), recurrent_shapes(), mode:
        symbolic = [
            mode.from_tensor(tensor, symbolic_context=_symbolic(spec))
            for spec, tensor in zip(graph.inputs, inputs, strict=True)
        ]
        module(*symbolic)
    return symbolic_conditions(symbolic, graph)


def _symbolic(spec: TensorSpec) -> StatelessSymbolicContext[Any, Any]:
    free = spec.dynamic_axes
    kinds = (DimDynamic.DYNAMIC, DimDynamic.STATIC)
    return StatelessSymbolicContext(
        dynamic_sizes=[kinds[axis not in free] for axis in range(len(spec.shape))]
    )
