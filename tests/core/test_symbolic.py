from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from samples import Function, with_dims
from torch import Tensor

from aitune_core import BatchDim, DynamicDim, SizeCondition
from aitune_core.symbolic import symbolic_conditions

ROWS, COLUMNS = BatchDim(1, 100, name="rows"), DynamicDim("columns", 2, 100)


def found(function: Callable[[Tensor], Tensor]) -> set[str]:
    """Return the conditions under which an export of a function is the function."""
    free = torch.export.Dim.AUTO
    program = torch.export.export(
        Function(function),
        (torch.ones(4, 6),),
        dynamic_shapes=({axis: free(min=dim.min, max=dim.max) for axis, dim in AXES.items()},),
        strict=False,
    )
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    conditions = symbolic_conditions(inputs, with_dims(ROWS, COLUMNS))
    assert all(isinstance(condition, SizeCondition) for condition in conditions)
    return {str(condition) for condition in conditions}


AXES = {0: ROWS, 1: COLUMNS}


@pytest.mark.parametrize(
    ("function", "conditions"),
    [
        (lambda x: x + 1, set()),
        (lambda x: x * 2 if x.shape[1] % 3 == 0 else x, {"columns % 3 == 0"}),
        (lambda x: x * 2 if x.shape[0] > 50 else x, {"rows <= 50"}),
        (lambda x: x + torch.ones(6), {"columns == 6"}),
        (lambda x: x * 2 if x.shape[1] < 200 else x, set()),
    ],
)
def test_what_the_code_takes_for_granted_of_sizes(
    function: Callable[[Tensor], Tensor], conditions: set[str]
) -> None:
    # To a tracer, one row is a size of its own.
    assert found(function) == conditions | {"rows >= 2"}
