"""Operators that exporters or kernels have got wrong: right values, or refused with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import aitune_core as ait
from aitune_core._precision import full_float32

Tune = Callable[..., Any]


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.function(x) if y is None else self.function(x, y)


def _right_or_refused(tune: Tune, module: nn.Module, calls: list[Any], unseen: list[Any]) -> bool:
    """Tune; check unseen calls where an engine won, else that the reason is one of ours."""
    try:
        tuned = tune(module, calls)
    except ait.TuningError as error:
        (cause,) = error.exceptions
        assert isinstance(cause, ait.BuildError)
        assert isinstance(cause.__cause__, ait.AituneError)
        return False
    for call in unseen:
        tuned.same(*call)
    return True


class Attention(nn.Module):
    """Causal with grouped heads, and with a float mask and a scale."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return causal, F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)


def test_causal_attention_with_grouped_heads_and_unequal_lengths(tune: Tune) -> None:
    def call(rows: int, queries: int, keys: int) -> tuple[Tensor, ...]:
        heads = [torch.randn(rows, n, size, 8) for n, size in ((4, queries), (2, keys), (2, keys))]
        return *heads, torch.randn(queries, keys)

    tuned = tune(Attention(), [call(1, 2, 7), call(3, 6, 3)])
    for sizes in ((2, 4, 4), (1, 3, 5), (3, 6, 3), (2, 2, 7)):
        tuned.same(*call(*sizes))


def test_row_of_a_mask_that_hides_everything(tune: Tune) -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None])

    def call(rows: int) -> tuple[Tensor, Tensor]:
        mask = torch.rand(rows, 5, 5) > 0.4
        mask[0, 2] = False
        return torch.randn(rows, 2, 5, 4), mask

    assert _right_or_refused(tune, Calls(attend), [call(2), call(4)], [call(3)])


@pytest.mark.parametrize(
    "options",
    [{"use_dynamo": True}, {"use_dynamo": True, "opset_version": 20}, {"use_dynamo": False}],
    ids=["opset 23", "opset 20", "tracer"],
)
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 2, 3)], ids=len)
def test_row_that_infinities_hide_is_zero(
    tune: Tune, leading: tuple[int, ...], options: dict[str, Any]
) -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x, mask = torch.randn(*leading, 5, 4), torch.randn(5, 5)
    tuned = tune(Calls(attend), [(x, mask)], options=options)
    mask[1, 3] = mask[2] = -torch.inf
    result = tuned.same(x, mask)
    assert not result[..., 2, :].any()
    assert result.isfinite().all()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_row_that_low_numbers_hide(tune: Tune, share: float) -> None:
    def attend(x: Tensor, padding: Tensor) -> Tensor:
        hidden = torch.finfo(x.dtype).min * share
        mask = torch.where(padding[:, None, None] > 0, hidden, x.sum(-1)[:, :, None])
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def call(rows: int, hidden: int) -> tuple[Tensor, ...]:
        padding = torch.zeros(rows, 5, dtype=torch.int64)
        padding[:hidden] = 1
        return torch.randn(rows, 2, 5, 4), padding

    tuned = tune(Calls(attend), [call(2, 0), call(4, 0)])
    for hidden in (0, 1, 3):
        tuned.same(*call(3, hidden))
    x, padding = call(2, 2)
    result = tuned.same(x, padding)
    if result.device.type == "cpu":
        torch.testing.assert_close(result, x.mean(2, keepdim=True).expand_as(x))


def test_one_head_of_keys_and_values_serves_all_queries(tune: Tune) -> None:
    class OneHead(nn.Module):
        def forward(self, q: Tensor, kv: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, kv, kv)

    def call(rows: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 4, length, 8), torch.randn(rows, 1, length, 8)

    tuned = tune(OneHead(), [call(1, 3), call(3, 9)])
    for rows, length in ((2, 5), (3, 3), (1, 9)):
        tuned.same(*call(rows, length))


def test_attention_that_is_causal_from_two_queries_on_is_limited_to_them(tune: Tune) -> None:
    class Causal(nn.Module):
        def forward(self, q: Tensor, kv: Tensor) -> Tensor:
            causal = q.shape[2] > 1
            return nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=causal)

    def call(rows: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 2, queries, 8), torch.randn(rows, 2, keys, 8)

    tuned = tune(
        Causal(),
        [call(1, 3, 3), call(3, 9, 7)],
        dynamic_shapes={"q": {2: ait.DynamicDim("queries", 2, 9)}},
    )
    for sizes in ((2, 5, 6), (3, 2, 7), (1, 9, 5)):
        tuned.same(*call(*sizes))
    single = tune(Causal(), [call(1, 1, 3), call(3, 1, 7)])
    single.same(*call(2, 1, 5))


class Encoder(nn.Module):
    """Transformer layers, whose eager code has a fast path of its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        y: Tensor = self.layers(x, src_key_padding_mask=padding)
        return y if padding is None else y * (~padding)[..., None]


def test_transformer_layers_with_and_without_padding(tune: Tune) -> None:
    def call(rows: int, length: int, *, padded: bool) -> tuple[Tensor, ...]:
        padding = torch.zeros(rows, length, dtype=torch.bool)
        padding[0, length - 1 :] = True
        x = torch.randn(rows, length, 16)
        return (x, padding) if padded else (x,)

    sizes = ((2, 5), (4, 8))
    with warnings.catch_warnings():
        # Eager's own, about nested tensors.
        warnings.filterwarnings("ignore", message=".*nested tensors.*")
        calls = [call(*size, padded=padded) for padded in (False, True) for size in sizes]
        tuned = tune(Encoder(), calls)
        for padded in (False, True):
            tuned.same(*call(3, 6, padded=padded))
            tuned.same(*call(2, 8, padded=padded))
    assert torch.backends.mha.get_fastpath_enabled()


def test_transformer_layers_give_what_eager_gives_for_rows_of_padding(tune: Tune) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            y: Tensor = self.layers(x, src_key_padding_mask=padding)
            return y

    def call(rows: int, length: int, *padded: int) -> tuple[Tensor, Tensor]:
        padding = torch.zeros(rows, length, dtype=torch.bool)
        for row, count in enumerate(padded):
            padding[row, length - count :] = True
        return torch.randn(rows, length, 16), padding

    tuned = tune(Padded(), [call(2, 5, 1), call(4, 8, 3, 0, 2)])
    tuned.same(*call(3, 6, 0, 4, 1))
    tuned.same(*call(3, 7, 7, 2, 1))


class Decoder(nn.Module):
    """`nn.Transformer` and its decoder alone; their masks over targets are causal or not."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.both = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, target: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        decoded: Tensor = self.decoder(target, memory, tgt_mask=mask)
        both: Tensor = self.both(memory, target, tgt_mask=mask)
        return decoded, both


def test_mask_of_a_decoder_need_not_be_the_causal_one_that_was_recorded(tune: Tune) -> None:
    causal = nn.Transformer.generate_square_subsequent_mask

    def call(rows: int, length: int, memory: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(rows, length, 16), torch.randn(rows, memory, 16), causal(length)

    tuned = tune(Decoder(), [call(2, 5, 7), call(3, 8, 4)])
    tuned.same(*call(2, 6, 5))
    target, memory, _ = call(3, 7, 6)
    tuned.same(target, memory, torch.randn(7, 7))
    tuned.same(target, memory, torch.zeros(7, 7))


class Recurrent(nn.Module):
    """A recurrent layer with its default state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


@pytest.mark.parametrize(
    "kind",
    [
        lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True),
        lambda: nn.GRU(4, 5, 1),
        pytest.param(lambda: nn.LSTM(4, 5), marks=pytest.mark.slow),
    ],
    ids=["bidirectional LSTM", "GRU", "LSTM, time first"],
)
def test_recurrent_layers_follow_batch_and_length(
    tune: Tune, kind: Callable[[], nn.Module]
) -> None:
    tuned = tune(Recurrent(kind()), [torch.randn(1, 7, 4), torch.randn(4, 3, 4)])
    for shape in ((2, 5), (1, 3), (4, 7), (3, 3)):
        tuned.same(torch.randn(*shape, 4))


def test_gru_with_a_state_given(tune: Tune) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 5, batch_first=True)

        def forward(self, x: Tensor, state: Tensor) -> Any:
            return self.layer(x, state)

    def call(rows: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, length, 4), torch.randn(1, rows, 5)

    tuned = tune(Given(), [call(1, 7), call(4, 3)])
    tuned.same(*call(2, 5))
    tuned.same(*call(3, 7))


def test_plain_rnn_follows_lengths_or_is_refused(tune: Tune) -> None:
    module = Recurrent(nn.RNN(3, 4, batch_first=True))
    calls = [torch.randn(2, 4, 3), torch.randn(3, 6, 3)]
    _right_or_refused(tune, module, calls, [(torch.randn(2, 5, 3),), (torch.randn(3, 6, 3),)])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_lstm_with_projection_is_refused_with_the_reason(tune: Tune) -> None:
    module = Recurrent(nn.LSTM(3, 4, proj_size=2, batch_first=True))
    with pytest.raises(ait.TuningError) as caught:
        tune(module, [torch.randn(2, 4, 3), torch.randn(3, 6, 3)])
    text = str(caught.value)
    assert "LSTM" in text or "lstm" in text
    assert all(isinstance(error, ait.BuildError) for error in caught.value.exceptions)


def _batches(*shape: int) -> list[Tensor]:
    return [torch.randn(rows, *shape) for rows in (2, 5)]


def _marked(kinds: Iterable[str], rare: frozenset[str]) -> list[Any]:
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind in rare)) for kind in kinds]


#: Left to the long run: neighbours of kinds that the short one has.
RARE_RESIZES = frozenset(["nearest, odd ratio", "area", "bilinear", "bicubic, corners"])
RESIZES: dict[str, dict[str, Any]] = {
    "nearest": {"size": (17, 9), "mode": "nearest"},
    "nearest, odd ratio": {"scale_factor": 1.7, "mode": "nearest"},
    "nearest-exact": {"scale_factor": 1.7, "mode": "nearest-exact"},
    "bilinear to one": {"size": (1, 1), "mode": "bilinear"},
    "bilinear": {"scale_factor": (0.5, 1.5), "mode": "bilinear", "align_corners": False},
    "bicubic, corners": {"scale_factor": 2.0, "mode": "bicubic", "align_corners": True},
    "antialias": {"size": (3, 4), "mode": "bilinear", "antialias": True},
    "area": {"size": (3, 2), "mode": "area"},
}


@pytest.mark.parametrize("kind", _marked(RESIZES, RARE_RESIZES))
def test_interpolation_is_right_or_refused(tune: Tune, kind: str) -> None:
    settings = RESIZES[kind]
    module = Calls(lambda x: F.interpolate(x, **settings))
    _right_or_refused(tune, module, _batches(2, 7, 6), [(torch.randn(3, 2, 7, 6),)])


def test_interpolation_of_changing_sizes_is_right_or_refused(tune: Tune) -> None:
    module = Calls(lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"))
    calls = [torch.randn(2, 2, 7, 6), torch.randn(3, 2, 9, 6)]
    assert _right_or_refused(tune, module, calls, [(torch.randn(2, 2, 8, 6),)])


def test_repeated_indices_add_up(tune: Tune) -> None:
    def add(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        zeros = x.new_zeros(5, 3)
        columns = index[:, None].expand(-1, 3)
        return (
            zeros.index_add(0, index, x),
            zeros.index_put((index,), x, accumulate=True),
            zeros.scatter_add(0, columns, x),
        )

    calls = [(torch.randn(n, 3), torch.randint(0, 3, (n,))) for n in (4, 8)]
    unseen = [(torch.randn(6, 3), torch.full((6,), index)) for index in (0, 4)]
    assert _right_or_refused(tune, Calls(add), calls, unseen)


@pytest.mark.parametrize("reduce", ["sum", "mean", pytest.param("amax", marks=pytest.mark.slow)])
def test_scatter_reduce_is_right_or_refused(tune: Tune, reduce: str) -> None:
    def scatter(x: Tensor, index: Tensor) -> Tensor:
        return x.new_ones(5).scatter_reduce(0, index, x, reduce=reduce, include_self=False)

    calls = [(torch.randn(n), torch.randint(0, 3, (n,))) for n in (4, 8)]
    unseen = [(torch.randn(6), torch.tensor([0, 0, 4, 4, 4, 1]))]
    _right_or_refused(tune, Calls(scatter), calls, unseen)


@pytest.mark.parametrize("low", [0, -6])
def test_negative_values_of_an_index_count_from_the_end(tune: Tune, low: int) -> None:
    def pick(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x[torch.arange(x.shape[0]), index], x[:, index[:2]]

    calls = [(torch.randn(n, 6), torch.randint(low, 6, (n,))) for n in (3, 5)]
    unseen = [(torch.randn(3, 6), torch.tensor([-1, -6, 2])), calls[0]]
    assert _right_or_refused(tune, Calls(pick), calls, unseen)


class Indexed(nn.Module):
    """A recurrent layer, which dynamo cannot export, and indexing that a trace gets wrong."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.RNN(3, 4, batch_first=True), kind

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        last: Tensor = self.layer(x)[0][:, -1]
        if self.kind == "index_add":
            return last.new_zeros(5, 4).index_add(0, index, last)
        if self.kind == "index_put":
            return last.new_zeros(5, 4).index_put((index,), last, accumulate=True)
        return last[torch.arange(last.shape[0], device=last.device), index]


@pytest.mark.parametrize("kind", ["index_add", "index_put", "gather"])
def test_indexing_that_traces_get_wrong_is_right_or_refused(tune: Tune, kind: str) -> None:
    calls = [
        (torch.randn(3, 4, 3), torch.tensor([0, 1, 2])),
        (torch.randn(4, 6, 3), torch.tensor([3, 2, 1, 0])),
    ]
    tuned = tune(Indexed(kind), calls, on_miss="eager", on_failure="eager", wins=False)
    index = torch.tensor([-1, -2, -3] if kind == "gather" else [1, 1, 1])
    x = torch.randn(3, 5, 3)
    with full_float32():
        assert torch.allclose(tuned.model(x, index), tuned.expected(x, index), atol=1e-5)
    assert tuned.winners == ["onnxruntime"] or "a trace" in str(tuned.report)


def test_floor_division_and_remainder_of_negative_tensors(tune: Tune) -> None:
    def divide(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x // y, x % y, torch.div(x, y, rounding_mode="trunc"), torch.fmod(x, y)

    whole = [(torch.arange(-n, n), torch.full((2 * n,), 3)) for n in (4, 7)]
    unseen = (
        torch.tensor([-7, -6, 5, 7, -1, 0, 8, -8, 9, 1]),
        torch.tensor([2, -4, -3, -7, 5] * 2),
    )
    assert _right_or_refused(tune, Calls(divide), whole, [unseen])
    floats = [(a.float() / 2, b.float()) for a, b in whole]
    assert _right_or_refused(tune, Calls(divide), floats, [tuple(t.float() for t in unseen)])


#: Left to the long run: neighbours of kinds that the short one has.
RARE_FUNCTIONS = frozenset(
    {
        "cdist, p=2",
        "einsum",
        "gelu",
        "group and instance norm",
        "norms",
        "one_hot and embedding",
        "pad",
        "roll and flip",
        "std and var",
        "unfold",
    }
)
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "cdist, p=1": lambda x: torch.cdist(x, x.flip(0) + 1, p=1.0),
    "cdist, p=2": lambda x: torch.cdist(x, x.flip(0) + 1),
    "softplus with threshold": lambda x: F.softplus(x * 30, beta=2.0, threshold=5.0),
    "adaptive pool": lambda x: F.adaptive_avg_pool1d(x[:, None], 4),
    "cumprod and cummax": lambda x: (x.cumprod(1), x.cummax(1)[0]),
    "sort, topk, argmax": lambda x: (x.sort(1), x.topk(2, dim=1).indices, x.argmax(1)),
    "std and var": lambda x: (x.std(1), x.var(1, unbiased=False)),
    "roll and flip": lambda x: x.roll(2, 1).flip(0),
    "rounding": lambda x: ((x * 2).round() / 2, x.trunc(), x.ceil(), x.frac()),
    "log and its infinities": lambda x: (x.log(), (x * 0).reciprocal(), x.clamp(min=0).log()),
    "norms": lambda x: (x.norm(dim=1), F.normalize(x, p=1), F.layer_norm(x, (6,))),
    "einsum": lambda x: torch.einsum("bi,bj->bij", x, x).tril().triu(-1),
    "gelu": lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.hardswish(x)),
    "masked": lambda x: torch.where(x > 0, x, float("-inf")).softmax(1),
    "one_hot and embedding": lambda x: F.one_hot(x.argmax(1), 6) * 2,
    "pad": lambda x: (
        F.pad(x, (1, 2), value=3.0),
        F.pad(x[:, None], (2, 1), mode="reflect"),
        F.pad(x[:, None], (2, 1), mode="replicate"),
    ),
    "group and instance norm": lambda x: (
        F.group_norm(x[..., None], 1),
        F.instance_norm(x.view(-1, 1, 6)),
    ),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "bool arithmetic": lambda x: ((x > 0) + (x < 1), (x > 0).sum(1), (x > 0) ^ (x < 1)),
}


@pytest.mark.parametrize("kind", _marked(FUNCTIONS, RARE_FUNCTIONS))
def test_function_is_right_or_refused(tune: Tune, kind: str) -> None:
    unseen = torch.randn(3, 6)
    _right_or_refused(tune, Calls(FUNCTIONS[kind]), _batches(6), [(unseen,), (unseen * 10,)])


def test_rotary_embedding_through_complex_numbers(tune: Tune) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            angles = torch.outer(torch.arange(16.0), 1.0 / (10 ** torch.arange(4.0)))
            self.register_buffer("turns", torch.polar(torch.ones(16, 4), angles))

        def forward(self, x: Tensor) -> Tensor:
            numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            turns: Tensor = self.get_buffer("turns")[: x.shape[1]]
            return torch.view_as_real(numbers * turns).flatten(-2)

    tuned = tune(Rotary(), [torch.randn(2, 5, 8), torch.randn(4, 8, 8)])
    tuned.same(torch.randn(3, 6, 8))
    tuned.same(torch.randn(2, 8, 8))
