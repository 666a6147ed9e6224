from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aitune_backend_onnxruntime.reads import hidden_reads, reads

X = torch.tensor([1.0, 2.0, 3.0])


class Net(nn.Module):
    """A module whose forward is a function of it and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _through(buffer: Tensor, x: Tensor) -> float:
    buffer[0:3] = x
    return buffer[1].item()


def _written_out(x: Tensor) -> float:
    out = torch.zeros(3)
    torch.mul(x, 2, out=out)
    return out[1].item()


@pytest.mark.parametrize(
    ("function", "way"),
    [
        (lambda _, x: x * x[0].item(), "item"),
        (lambda _, x: x * round(x[0].item()), "item"),
        (lambda _, x: x * int(x[0]), "__int__"),
        (lambda _, x: x * float(x.sum()), "__float__"),
        (lambda _, x: x * x.tolist()[0], "tolist"),
        (lambda _, x: x * [1, 2][x[0].long()], "__index__"),
        (lambda _, x: x * 2 if torch.equal(x, x.abs()) else x, "equal"),
        (lambda _, x: x * 2 if torch.allclose(x, x.abs()) else x, "allclose"),
        (lambda _, x: x * 2 if (x > 0).any() else x, "__bool__"),
        (lambda _, x: x * 2 if 1.0 in x else x, "__contains__"),
        (lambda _, x: x * _through(torch.zeros(3), x), "item"),
        (lambda _, x: x * _written_out(x), "item"),
    ],
)
def test_reads_that_a_trace_freezes(function: Any, way: str) -> None:
    assert reads(Net(function), [X]) == way
    assert hidden_reads(Net(function), [X]) is None


@pytest.mark.parametrize(
    ("function", "way"),
    [
        (lambda _, x: x * len(repr(x)), "__repr__"),
        (lambda _, x: x * len(f"{x[0]}"), "__format__"),
        (lambda _, x: x * float(np.from_dlpack(x).max()), "__dlpack__"),
        (lambda _, x: x * float(x.numpy().max()), "numpy"),
        (lambda _, x: x * float(np.asarray(x)[0]), "__array__"),
        (lambda _, x: x * copy.deepcopy(x).max().item(), "__deepcopy__"),
        (lambda _, x: x * x.untyped_storage()[3], "untyped_storage"),
    ],
)
def test_reads_that_no_exporter_notices(function: Any, way: str) -> None:
    assert reads(Net(function), [X]) == hidden_reads(Net(function), [X]) == way


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x * net.weight.item(),
        lambda _, x: x * torch.zeros_like(x)[0].item(),
        lambda _, x: x.new_ones(2).sum().item() * x,
        lambda _, x: x * x.shape[0],
        lambda _, x: x[: x[1].long()],
        lambda _, x: torch.where(x > 1, x, -x),
    ],
)
def test_constants_sizes_and_tensors_are_no_reads(function: Any) -> None:
    assert reads(Net(function), [X]) is None
