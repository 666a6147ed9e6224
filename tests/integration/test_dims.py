"""Sizes that change: right for every size in range, refused by name outside of it."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Convolution(nn.Module):
    """Convolution, batch norm, pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return y


@pytest.mark.parametrize(
    "batches",
    [
        (1, 8),
        pytest.param((8, 1), marks=pytest.mark.slow),
        pytest.param((1, 3, 8), marks=pytest.mark.slow),
    ],
)
def test_batch_of_one_is_one_size_among_others(tune: Tune, batches: tuple[int, ...]) -> None:
    tuned = tune(Convolution(), [torch.randn(rows, 3, 8, 8) for rows in batches])
    for rows in range(1, 9):
        tuned.same(torch.randn(rows, 3, 8, 8))


class Attend(nn.Module):
    """Two lengths that are independent of each other and of the batch."""

    def forward(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(q @ kv.transpose(-1, -2), -1)
        return weights @ kv, torch.cat([q, kv], 1)


def _qkv(rows: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, queries, 6), torch.randn(rows, keys, 6)


def test_sizes_that_are_equal_by_chance_stay_independent(tune: Tune) -> None:
    tuned = tune(Attend(), [_qkv(4, 4, 4), _qkv(6, 6, 6), _qkv(2, 7, 2), _qkv(3, 3, 8)])
    for sizes in ((4, 4, 4), (2, 3, 5), (5, 6, 2), (6, 3, 3), (3, 5, 8), (2, 7, 7)):
        tuned.same(*_qkv(*sizes))


def test_recorded_broadcast_is_taken_beside_equal_sizes(tune: Tune) -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 + y

    calls = [(torch.randn(4, 3), torch.randn(rows, 3)) for rows in (1, 4)]
    tuned = tune(Adds(), [*calls, (torch.randn(2, 3), torch.randn(2, 3))])
    for rows, others in ((3, 1), (3, 3), (2, 1), (4, 4)):
        tuned.same(torch.randn(rows, 3), torch.randn(others, 3))
    with pytest.raises(ait.AituneError):
        tuned.model(torch.randn(4, 3), torch.randn(3, 3))


def test_sizes_that_always_moved_together_are_one_dim(tune: Tune) -> None:
    tuned = tune(Attend(), [_qkv(2, 4, 4), _qkv(2, 7, 7)])
    assert len(tuned.graphs[0].dims) == 1
    tuned.same(*_qkv(2, 5, 5))
    error = tuned.misses(*_qkv(2, 5, 6))
    assert (error.path, error.expected, error.got) == ("kv", 5, 6)


class Broadcast(nn.Module):
    """An axis that may be 1 where another one is not."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, x * 2), 1) + y


def test_axis_that_is_sometimes_one_broadcasts_as_in_eager(tune: Tune) -> None:
    def call(rows: int, other: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 3), torch.randn(other, 6)

    recorded = [call(4, 1), call(4, 4), call(2, 2)]
    tuned = tune(Broadcast(), recorded, wins=False, on_failure="eager", on_miss="eager")
    for args in (*recorded, call(3, 3), call(3, 1), call(4, 4)):
        got = tuned.model(*args)
        assert torch.allclose(got, tuned.expected(*args))
    if tuned.winners == ["onnxruntime"]:
        tuned.same(*call(3, 3))
        tuned.same(*call(3, 1))


class Split(nn.Module):
    """Sizes as Python integers in views: heads, products and quotients."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows, length = int(x.shape[0]), len(x[0])
        y = self.mix(x)
        heads = y.reshape(rows * 2, length, 4).softmax(1).reshape(rows, 2, length, 4)
        return heads.sum(1), y.sum() / rows, y.flatten(0, 1), y.view(rows, -1), y.reshape(-1, 2)


def test_sizes_read_as_integers_follow_the_call(tune: Tune) -> None:
    tuned = tune(Split(), [torch.randn(1, 4, 8), torch.randn(8, 6, 8)])
    for rows, length in ((1, 4), (3, 5), (8, 4), (2, 6)):
        tuned.same(torch.randn(rows, length, 8))


def test_length_that_must_be_a_multiple(tune: Tune) -> None:
    class Chunks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows, length = x.shape
            return x.view(rows, 4, -1).amax(1) + length // 4

    tuned = tune(Chunks(), [torch.randn(2, 8), torch.randn(5, 24)])
    for rows, length in ((2, 12), (3, 16), (5, 20)):
        tuned.same(torch.randn(rows, length))
    with pytest.raises(Exception, match=r"\S") as caught:
        tuned.model(torch.randn(2, 10))
    assert isinstance(caught.value, ait.AituneError)


def test_length_that_is_a_multiple_of_the_batch(tune: Tune) -> None:
    class Regroup(nn.Module):
        def forward(self, x: Tensor, per_row: Tensor) -> Tensor:
            rows = per_row.shape[0]
            return x.view(rows, -1, 3).sum(1) * per_row

    def call(rows: int, count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows * count, 3), torch.randn(rows, 1)

    tuned = tune(Regroup(), [call(2, 3), call(5, 4)])
    for rows, count in ((2, 3), (3, 4), (4, 2), (5, 4)):
        tuned.same(*call(rows, count))


def test_flatten_of_changing_height_and_width(tune: Tune) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x).flatten(2).transpose(1, 2)
            return y - y.mean(1, keepdim=True)

    sizes = ((1, 4, 6), (3, 8, 8), (2, 10, 4))
    tuned = tune(Patches(), [torch.randn(b, 3, h, w) for b, h, w in sizes])
    for b, h, w in ((2, 6, 6), (3, 9, 5), (1, 7, 8), (1, 5, 7)):
        assert tuned.same(torch.randn(b, 3, h, w)).shape[1] == (h // 2) * (w // 2)


class Branch(nn.Module):
    """Does something else where the length exceeds 8."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :8].sum(1) * 100 if x.shape[1] > 8 else x.cumsum(1)[:, -1]


def test_branch_on_a_size_is_refused_where_both_sides_were_recorded(tune: Tune) -> None:
    with pytest.raises(ait.TuningError) as caught:
        tune(Branch(), [torch.randn(2, 5), torch.randn(3, 12)])
    (error,) = caught.value.exceptions
    assert isinstance(error, ait.BuildError)
    assert isinstance(error.__cause__, ait.ValidationError)
    text = str(error)
    limit = (
        r"what was built takes sizes with x_1 (>=? [89]|<=? [89]), and recorded call \d has x_1 ="
    )
    for way in ("Dim.DYNAMIC", "the tracer"):
        assert re.search(f"{way}: {limit}", text)


@pytest.mark.parametrize("lengths", [(3, 8), pytest.param((9, 14), marks=pytest.mark.slow)])
def test_one_side_of_a_branch_on_a_size_is_tuned(tune: Tune, lengths: tuple[int, int]) -> None:
    tuned = tune(Branch(), [torch.randn(rows, n) for rows, n in zip((2, 4), lengths, strict=True)])
    for length in range(lengths[0], lengths[1] + 1):
        tuned.same(torch.randn(3, length))
    for length in (lengths[0] - 1, lengths[1] + 1):
        error = tuned.misses(torch.randn(3, length))
        assert (error.path, error.got) == ("x", length)


class Rare(nn.Module):
    """Does something else at sizes that are rarely seen."""

    def __init__(self, rare: Callable[[int], bool]) -> None:
        super().__init__()
        self.rare = rare

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) * 3 if self.rare(x.shape[1]) else x.sum(1)


@pytest.mark.parametrize(
    ("rare", "length", "condition"),
    [
        (lambda n: n % 2 == 1, 77, "x_1 % 2 != 1"),
        (lambda n: n == 77, 77, "x_1 != 77"),
        (lambda n: n // 3 % 5 == 4, 44, "x_1 // 3 % 5 != 4"),
    ],
    ids=["odd", "one", "nested"],
)
@pytest.mark.parametrize("use_dynamo", [True, False])
def test_branch_on_a_size_that_no_recorded_call_takes_is_a_miss(
    tune: Tune, rare: Callable[[int], bool], length: int, condition: str, *, use_dynamo: bool
) -> None:
    shapes = {"x": {1: ait.DynamicDim("x_1", 2, 900)}}
    calls = [torch.randn(2, 4), torch.randn(3, 300)]
    options = {"use_dynamo": use_dynamo}
    tuned = tune(Rare(rare), calls, dynamic_shapes=shapes, options=options)
    for same in (6, 100, 306):
        tuned.same(torch.randn(2, same))
    assert tuned.graphs[0].conditions == (condition,)
    assert condition in str(tuned.report)
    error = tuned.misses(torch.randn(2, length))
    assert (error.path, error.expected, error.got) == ("x", condition, {"x_1": length})


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_branch_behind_a_branch_that_makes_no_difference_is_found(
    tune: Tune, *, use_dynamo: bool
) -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > 100:
                return x * (3 if x.shape[1] % 64 == 0 else 2)
            return x + x

    tuned = tune(
        Nested(), [torch.randn(2, 8), torch.randn(2, 1000)], options={"use_dynamo": use_dynamo}
    )
    assert tuned.graphs[0].conditions == ("x_1 % 64 != 0",)
    for length in (9, 99, 100, 101, 127, 999):
        tuned.same(torch.randn(2, length))
    assert tuned.misses(torch.randn(2, 640)).got == {"x_1": 640}


def test_branch_for_single_rows_of_some_lengths_is_found(tune: Tune) -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3 if x.shape[0] == 1 and x.shape[1] % 7 == 0 else x * 2

    tuned = tune(Single(), [torch.randn(3, 8), torch.randn(2, 64)])
    tuned.same(torch.randn(3, 14))
    single = tune(
        Single(),
        [torch.randn(3, 8), torch.randn(1, 64)],
        dynamic_shapes={},
        on_failure="eager",
        wins=False,
    )
    assert single.winners == [None]


class Locked(nn.Module):
    """Cannot be copied, and so not be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] > 64 and x.shape[0] % 64 == 0 else x * 2


class Steps(nn.Module):
    """Has a path for each of many sizes, and one that differs."""

    def forward(self, x: Tensor) -> Tensor:
        for step in range(30):
            if x.shape[0] < (step + 1) * 30:
                return x * 2 if step != 21 else x * 3
        return x * 2


@pytest.mark.parametrize(
    ("make", "rows"), [(Locked, (20, 5)), (Locked, (20, 999)), (Steps, (20, 5, 999))]
)
def test_code_that_cannot_be_gone_through_is_right_or_a_miss(
    tune: Tune, make: Callable[[], nn.Module], rows: tuple[int, ...]
) -> None:
    tuned = tune(
        make(),
        [torch.randn(count, 4) for count in rows],
        dynamic_shapes={"x": {0: ait.BatchDim(1, 999)}} if len(rows) > 2 else None,
        reference=make(),
        on_miss="eager",
        on_failure="eager",
        wins=False,
    )
    for count in (*rows, 128, 640, 650):
        x = torch.randn(count, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ait.MissWarning)
            assert torch.allclose(tuned.model(x), tuned.expected(x))


def test_branch_on_a_size_with_equal_sides_limits_nothing(tune: Tune) -> None:
    class Alike(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] % 2 == 0 or x.shape[0] > 100 else x + x

    tuned = tune(Alike(), [torch.randn(4, 2)], dynamic_shapes={"x": {0: ait.BatchDim(1, 400)}})
    assert tuned.graphs[0].conditions == ()
    for rows in (3, 4, 77, 399):
        tuned.same(torch.randn(rows, 2))


def test_limits_on_sizes_are_stored_in_checkpoints(tune: Tune, tmp_path: Path) -> None:
    tuned = tune(Rare(lambda n: n % 4 != 0), [torch.randn(2, 4), torch.randn(3, 64)])
    ait.save(tuned.model, tmp_path / "model.ait")
    loaded = ait.load(tmp_path / "model.ait", on_miss="error")
    x = torch.randn(2, 16)
    assert torch.allclose(loaded(x), tuned.expected(x))
    with pytest.raises(ait.InputMismatchError, match="x_1 % 4 == 0"):
        loaded(torch.randn(2, 18))


class Cached(nn.Module):
    """Attention over past and new rows, with a mask over both."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(
        self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        keys = torch.cat([past[0], self.key(x)], 1)
        values = torch.cat([past[1], self.value(x)], 1)
        scores = self.query(x) @ keys.transpose(1, 2) + mask[:, None]
        return scores.softmax(-1) @ values, (keys, values)


def _step(rows: int, new: int, past: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    mask = torch.zeros(rows, new + past).masked_fill(torch.rand(rows, new + past) < 0.2, -1e4)
    return torch.randn(rows, new, 8), mask, (torch.randn(rows, past, 8), torch.randn(rows, past, 8))


@pytest.mark.parametrize("new", [1, None], ids=["one token", "some tokens"])
def test_mask_over_past_and_new_tokens_follows_their_lengths(tune: Tune, new: int | None) -> None:
    sizes = ((1, 1, 4), (2, 3, 9), (3, 5, 30))
    calls = [_step(rows, new or count, length) for rows, count, length in sizes]
    tuned = tune(Cached(), calls)
    for rows, count, length in ((2, 2, 17), (1, 4, 30), (3, 1, 5)):
        _, (keys, _) = tuned.same(*_step(rows, new or count, length))
        assert keys.shape == (rows, (new or count) + length, 8)
    x, mask, past = _step(2, new or 3, 9)
    error = tuned.misses(x, torch.cat([mask, mask[:, :1]], 1), past)
    assert "mask_1 == " in str(error.expected)


class Loop(nn.Module):
    """Walks over the rows of an axis."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0])
        for step in range(x.shape[1]):
            state = torch.tanh(state * 0.5 + x[:, step])
        return state


def test_loop_over_a_size_is_never_right_for_one_size_alone(tune: Tune) -> None:
    calls = [torch.randn(2, 4), torch.randn(3, 6)]
    with pytest.raises(ait.TuningError):
        tune(Loop(), calls)
    tuned = tune(Loop(), [torch.randn(2, 5), torch.randn(4, 5)])
    tuned.same(torch.randn(3, 5))
    assert tuned.misses(torch.randn(3, 6)).path == "x"


class Linear(nn.Module):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(x)
        return y


@pytest.fixture(scope="module")
def static(tune_once: Tune) -> Any:
    return tune_once(Linear(), [torch.randn(4, 6)])


@pytest.mark.parametrize(
    ("shape", "expected", "got"),
    [
        ((5, 6), 4, 5),
        ((2, 6), 4, 2),
        ((4, 7), 6, 7),
        ((4, 2, 6), 2, 3),
        ((6,), 2, 1),
        ((0, 6), 4, 0),
    ],
)
def test_shape_that_was_not_recorded_is_a_miss_with_both_shapes(
    static: Any, shape: tuple[int, ...], expected: int, got: int
) -> None:
    error = static.misses(torch.randn(shape))
    assert (error.path, error.expected, error.got) == ("x", expected, got)


def test_size_outside_the_range_is_a_miss_with_the_range(tune: Tune) -> None:
    tuned = tune(Linear(), [torch.randn(2, 6), torch.randn(5, 6)])
    for rows in (0, 1, 6, 1000):
        error = tuned.misses(torch.randn(rows, 6))
        assert (error.path, error.expected, error.got) == ("x", "batch[2..5]", rows)


def test_explicit_range_is_wider_than_what_was_recorded(tune: Tune) -> None:
    shapes = {"x": {0: ait.BatchDim(1, 16)}}
    tuned = tune(Linear(), [torch.randn(4, 6)], dynamic_shapes=shapes)
    for rows in (1, 3, 16):
        tuned.same(torch.randn(rows, 6))
    assert tuned.misses(torch.randn(17, 6)).got == 17


def test_explicit_dims_of_tensors_in_containers(tune: Tune) -> None:
    class Nested(nn.Module):
        def forward(self, batch: dict[str, Any], weights: list[Tensor]) -> Tensor:
            total: Tensor = (batch["ids"][0] * weights[1]).sum(-1)
            return total + weights[0]

    rows, length = ait.BatchDim(1, 8), ait.DynamicDim("length", 2, 32)
    shapes = {
        "batch['ids'][0]": {0: rows, 1: length},
        "weights[0]": {0: rows},
        "weights[1]": {-1: length},
    }

    def call(rows: int, length: int) -> tuple[Any, ...]:
        ids = {"ids": (torch.randn(rows, length),)}
        return ids, [torch.randn(rows), torch.randn(length)]

    tuned = tune(Nested(), [call(3, 5)], dynamic_shapes=shapes)
    for sizes in ((1, 2), (8, 32), (4, 4), (2, 31)):
        tuned.same(*call(*sizes))
    ids, weights = call(3, 5)
    error = tuned.misses(ids, [weights[0], torch.randn(6)])
    assert (error.path, error.expected, error.got) == ("weights[1]", 5, 6)


def test_explicit_dim_that_the_module_cannot_follow_is_refused(tune: Tune) -> None:
    shapes = {"x": {1: ait.DynamicDim("length", 2, 32)}}
    with pytest.raises(ait.TuningError) as caught:
        tune(Branch(), [torch.randn(2, 5)], dynamic_shapes=shapes)
    (error,) = caught.value.exceptions
    assert "the declared length[2..32] is not served whole" in str(error)
    assert "the engine takes sizes with length <= 8" in str(error)


def test_batch_sizes_make_calls_of_other_batches(tune: Tune) -> None:
    tuned = tune(Linear(), [torch.randn(3, 6)], batch_sizes=[1, 8])
    for rows in (1, 2, 3, 8):
        tuned.same(torch.randn(rows, 6))
    assert tuned.misses(torch.randn(9, 6)).got == 9


def test_size_range_of_a_float16_range_or_linspace_follows_the_call(tune: Tune) -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            return x + torch.arange(length) / length + torch.arange(0, 2 * length, 2)

    tuned = tune(Positions(), [torch.randn(2, 4), torch.randn(3, 9)])
    for length in (4, 5, 7, 9):
        tuned.same(torch.randn(2, length))


class Detector(nn.Module):
    """A head that keeps the best of all places of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.scores = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.scores(self.features(x).relu()).sigmoid().flatten(2).transpose(1, 2)
        best, labels = scores.max(-1)
        values, places = best.topk(20, 1)
        return values, places, labels.gather(1, places)


@pytest.mark.parametrize("dynamo", [True, False])
def test_best_places_at_sizes_whose_made_up_inputs_repeat_recorded_ones(
    tune: Tune, dynamo: bool
) -> None:
    rows, height, width = (
        ait.DynamicDim(name, low, high)
        for name, low, high in (("rows", 1, 4), ("height", 9, 48), ("width", 9, 48))
    )
    tuned = tune(
        Detector(),
        [torch.randn(2, 3, 16, 24), torch.randn(3, 3, 20, 18)],
        dynamic_shapes={"x": {0: rows, 2: height, 3: width}},
        options={"use_dynamo": dynamo},
    )
    for sizes in ((1, 3, 9, 40), (4, 3, 48, 48), (1, 3, 33, 33)):
        tuned.same(torch.randn(sizes))
