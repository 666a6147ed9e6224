from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import Function
from torch import Tensor, nn
from torch.nn import functional

from aitune_core._widening import (
    NotFollowedError,
    Widening,
    own_type,
    sharing_copy,
    wider_type,
)

X = torch.tensor([0.1, -2.0, 3.0])
WIDE = X.double()


def wide(function: Callable[..., Any], *inputs: Tensor, own: torch.dtype = torch.float32) -> Any:
    """Run a function in a wider type; inputs are cloned there, as for the flat module."""
    with torch.no_grad(), Widening(wider_type(own) or torch.float64, own).active():
        return function(*(tensor.clone() for tensor in inputs))


class Named(nn.Module):
    """Names its type wherever it can."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        assert torch.finfo(x.dtype).bits == 32
        y = x.to(torch.float32) + torch.zeros(3, dtype=x.dtype) + torch.tensor([0.0])
        y = torch.cat([y, torch.ones(1, dtype=torch.float32)])[:3]
        return y.type_as(x).float().to(dtype=torch.float32) / torch.full((), 3.0)


def test_code_that_names_its_type_runs_in_a_wider_one() -> None:
    result = wide(Named(), X)
    assert result.dtype is torch.float64
    assert torch.equal(result, WIDE / 3)


def test_half_precision_runs_in_float32() -> None:
    x = X.half()
    result = wide(lambda x: (x / 3).half() * torch.ones(3, dtype=x.dtype), x, own=torch.float16)
    assert result.dtype is torch.float32
    assert torch.equal(result, x.float() / 3)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        nn.LayerNorm(6),
        nn.LSTM(6, 4, num_layers=2, bidirectional=True),
        nn.GRU(6, 4),
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        nn.Conv1d(5, 3, 2),
        nn.Sequential(nn.BatchNorm1d(5), nn.ReLU(inplace=True)),
        nn.PReLU(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_give_what_a_double_copy_gives(layer: nn.Module) -> None:
    layer.eval()
    x = torch.randn(2, 5, 6)
    got = wide(layer, x)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.no_grad():
        expected = layer.double()(x.double())
    for one, other in zip(leaves(expected), leaves(got), strict=True):
        assert one.dtype is other.dtype is torch.float64
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    assert all(
        tensor.dtype is torch.float32 for tensor in state.values() if tensor.is_floating_point()
    )


def leaves(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [leaf for part in result for leaf in leaves(part)]


def test_mask_of_the_module_meets_wide_queries_in_fused_attention() -> None:
    mask = torch.full((3, 3), float("-inf")).triu(1)
    x = torch.randn(2, 3, 4)

    def attend(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    expected = functional.scaled_dot_product_attention(
        x.double(), x.double(), x.double(), attn_mask=mask.double()
    )
    torch.testing.assert_close(wide(attend, x), expected, rtol=1e-13, atol=1e-13)


def test_integers_and_booleans_stay() -> None:
    ids = torch.tensor([2, 0])
    table = torch.tensor([0.1, 0.2, 0.3])

    def pick(ids: Tensor) -> tuple[Tensor, ...]:
        return ids * 2, ids > 0, functional.embedding(ids, table[:, None]), table[ids]

    doubled, positive, rows, values = wide(pick, ids)
    assert doubled.dtype is torch.int64
    assert positive.dtype is torch.bool
    assert torch.equal(rows[:, 0], table[ids].double())
    assert torch.equal(values, table[ids].double())


def test_complex_numbers_are_widened() -> None:
    def turn(x: Tensor) -> Tensor:
        return torch.view_as_complex(x[:2]) * torch.polar(torch.ones(()), torch.tensor(0.5))

    result = wide(turn, X)
    assert result.dtype is torch.complex128


def test_changes_in_place_stay_in_what_the_run_made() -> None:
    x = X.clone()

    def change(x: Tensor) -> Tensor:
        y = torch.zeros(3)
        y[1:] = x[1:]
        x.add_(y).mul_(torch.tensor(0.1))
        return x

    assert torch.equal(wide(change, x), (WIDE + torch.tensor([0.0, -2, 3])) * torch.tensor(0.1))
    assert torch.equal(x, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, own: own.add_(x),
        lambda x, own: own.copy_(x),
        lambda x, own: own.__setitem__(0, x[0]),
        lambda x, own: torch.add(x, 1, out=own),
        lambda x, own: functional.relu_(own),
        lambda x, own: own.zero_(),
        lambda x, own: own[:2].mul_(2),
    ],
)
def test_writes_into_tensors_that_were_there_are_refused(function: Any) -> None:
    own = X.clone()
    with pytest.raises(NotFollowedError, match="writes into a tensor"):
        wide(lambda x: function(x, own), X)
    assert torch.equal(own, X)


def test_data_of_tensors_that_were_there_is_not_exchanged() -> None:
    own = X.clone()

    def exchange(x: Tensor) -> Tensor:
        own.data = x
        return own * 2

    with pytest.raises(NotFollowedError, match="an attribute of a tensor is set"):
        wide(exchange, X)
    assert own.dtype is torch.float32


def test_bits_of_numbers_are_not_read() -> None:
    with pytest.raises(NotFollowedError, match="bits"):
        wide(lambda x: x.view(torch.int32), X)


def test_copies_of_weights_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(100), torch.ones(100)
    monkeypatch.setattr("aitune_core._widening._MAX_KEPT_BYTES", 1000)
    widening = Widening(torch.float64, torch.float32, [first, second])
    x = torch.ones(100, dtype=torch.float64)
    for _ in range(2):
        with widening.active():
            assert torch.equal(x * first * second, x)
    assert list(widening._widen._kept) == [id(first)]


def test_copy_shares_tensors_and_nothing_else() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("table", torch.ones(2))
            self.plain = torch.ones(3)
            self.cache: dict[str, Tensor] = {"a": torch.ones(2)}

    module = Holds()
    copy: Any = sharing_copy(module)
    assert copy.layer.weight is module.layer.weight
    assert copy.table is module.table
    assert copy.plain is module.plain
    assert copy.cache["a"] is module.cache["a"]
    copy.cache["b"] = copy.last = torch.ones(1)
    assert list(module.cache) == ["a"]
    assert not hasattr(module, "last")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_parts_are_not_copied() -> None:
    with pytest.raises(NotFollowedError, match="scripted"):
        sharing_copy(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))


def test_type_of_most_weights_counts_then_that_of_inputs() -> None:
    mixed = nn.Sequential(nn.Linear(8, 8).half(), nn.LayerNorm(8))
    assert own_type(mixed, [X]) is torch.float16
    assert own_type(Function(lambda x: x), [X, torch.ones(1, dtype=torch.float64)]) is torch.float32
    assert own_type(Function(lambda x: x), [torch.ones(2, dtype=torch.complex64)]) is torch.float32
    assert own_type(Function(lambda x: x), [torch.arange(3)]) is None
    assert wider_type(torch.float32) is torch.float64
    assert wider_type(torch.bfloat16) is torch.float32
    assert wider_type(torch.float64) is None
    assert wider_type(None) is None
