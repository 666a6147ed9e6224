"""In-place changes: those of inputs reach the caller's tensors, those of state are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Writes(nn.Module):
    """Changes its arguments with a function, and returns something made from them."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.change(x, y)


def _slices(x: Tensor, y: Tensor) -> Any:
    x[:, : y.size(1)] = y
    x[:, -1:] *= 2
    return x * 3


def _masked(x: Tensor, y: Tensor) -> Any:
    x.masked_fill_(x > 0.5, -1.0)
    y.clamp_(min=0)
    return x.sum() + y.sum()


def _added(x: Tensor, y: Tensor) -> Any:
    x.add_(y.sum())
    return x


def _view(x: Tensor, y: Tensor) -> Any:
    x.view(-1)[::2].mul_(10)
    x.t()[0].copy_(y[:, 0])
    return x.mean(), x


def _returned(x: Tensor, y: Tensor) -> Any:
    x += 1
    y.zero_()
    return {"x": x, "view": x[:, 1:], "y": y}


def _indexed(x: Tensor, y: Tensor) -> Any:
    x[torch.arange(x.shape[0]), 0] = 5.0
    x.index_fill_(1, torch.tensor([1]), -2.0)
    y[y < 0] = 0.0
    return x + y.sum()


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "slices": _slices,
    "masked_fill_": _masked,
    "add_": _added,
    "views": _view,
    "returned too": _returned,
    "indices and masks": _indexed,
}


def _call(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 5), torch.randn(rows, 2)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "add_")) for kind in CHANGES],
)
def test_changes_of_inputs_reach_the_tensors_of_the_caller(tune: Tune, kind: str) -> None:
    recorded = [_call(2), _call(4)]
    tuned = tune(Writes(CHANGES[kind]), recorded)
    tuned.same(*_call(3))
    for call in recorded:
        tuned.same(*call)


@pytest.mark.parametrize("layout", ["transposed", "strided", "sliced", "flipped"])
def test_changes_reach_inputs_of_every_layout(writer: Any, layout: str) -> None:
    base = torch.randn(12, 12)
    x = {
        "transposed": base[:5, :3].t(),
        "strided": base[::4, 1:11:2],
        "sliced": base[3:6, 2:7],
        "flipped": base[:3, :5].flip(0),
    }[layout]
    y = torch.randn(3, 2)
    theirs, ours = base.clone(), base.clone()
    if layout == "flipped":
        writer.same(x, y)
        return
    expected_x = theirs.as_strided(x.shape, x.stride(), x.storage_offset())
    got_x = ours.as_strided(x.shape, x.stride(), x.storage_offset())
    expected = writer.eager(expected_x, y.clone())
    got = writer.model(got_x, y.clone())
    assert torch.allclose(expected, got)
    assert torch.allclose(theirs, ours)  # and nothing around the view was written to
    assert writer.eager_calls == 0


@pytest.fixture(scope="module")
def writer(tune_once: Tune) -> Any:
    return tune_once(Writes(_slices), [_call(2), _call(4)])


def test_change_of_a_scalar_tensor(tune: Tune) -> None:
    def count(x: Tensor, y: Tensor) -> Tensor:
        x += 1
        return y * x

    tuned = tune(
        Writes(count), [(torch.tensor(3), torch.randn(2)), (torch.tensor(7), torch.randn(4))]
    )
    counter = torch.tensor(41)
    for expected in (42, 43):
        tuned.model(counter, torch.randn(3))
        assert counter.item() == expected
    tuned.same(torch.tensor(-1), torch.randn(3))


def test_one_tensor_given_twice_and_changed(tune: Tune) -> None:
    # Either as in eager, or a miss: never silently as if they were two tensors.
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.add_(10)
        return x * 2 + y

    calls = [(torch.randn(2, 3), torch.randn(2, 3)), (torch.randn(4, 3), torch.randn(4, 3))]
    tuned = tune(Writes(change), calls, on_miss="eager")
    x = torch.randn(3, 3)
    theirs, ours = x.clone(), x.clone()
    expected = tuned.eager(theirs, theirs)
    try:
        got = tuned.model(ours, ours)
    except ait.AituneError:
        return
    except ait.MissWarning:
        return
    assert torch.allclose(expected, got)
    assert torch.allclose(theirs, ours)


def test_views_of_one_memory_that_overlap_and_are_changed(tune: Tune) -> None:
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.add_(10)
        return x * 2 + y

    calls = [(torch.randn(2, 3), torch.randn(2, 3)), (torch.randn(4, 3), torch.randn(4, 3))]
    tuned = tune(Writes(change), calls, on_miss="eager")
    base = torch.randn(4, 3)
    theirs, ours = base.clone(), base.clone()
    expected = tuned.eager(theirs[:3], theirs[1:])
    try:
        got = tuned.model(ours[:3], ours[1:])
    except (ait.AituneError, ait.MissWarning):
        return
    assert torch.allclose(expected, got)
    assert torch.allclose(theirs, ours)


def test_tensor_given_twice_and_changed_while_recording(tune: Tune) -> None:
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.add_(10)
        return x * 2 + y

    a, b = torch.randn(2, 3), torch.randn(4, 3)
    try:
        tuned = tune(Writes(change), [(a, a), (b, b)])
    except ait.AituneError:
        return
    x = torch.randn(3, 3)
    theirs, ours = x.clone(), x.clone()
    expected = tuned.eager(theirs, theirs)
    got = tuned.model(ours, ours)
    assert torch.allclose(expected, got)
    assert torch.allclose(theirs, ours)


def test_change_that_recorded_calls_did_not_show_is_not_lost(tune: Tune) -> None:
    # The values of the recorded calls are such that clamp_ changes nothing.
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.clamp_(max=100.0)
        return x + y

    calls = [(torch.randn(2, 3), torch.randn(2, 3)), (torch.randn(4, 3), torch.randn(4, 3))]
    tuned = tune(Writes(change), calls)
    tuned.same(torch.full((3, 3), 500.0), torch.randn(3, 3))


def test_changes_of_tensors_in_containers(tune: Tune) -> None:
    class Update(nn.Module):
        def forward(self, cache: dict[str, list[Tensor]], x: Tensor) -> Tensor:
            for position, tensor in enumerate(cache["keys"]):
                tensor[:, 0] = x[:, 0] * (position + 1)
            return cache["keys"][0].sum() + cache["keys"][1]

    def call(rows: int) -> Any:
        return {"keys": [torch.randn(rows, 3), torch.randn(rows, 3)]}, torch.randn(rows, 3)

    tuned = tune(Update(), [call(2), call(5)])
    tuned.same(*call(3))


def test_result_is_not_the_input_that_was_changed(tune: Tune) -> None:
    tuned = tune(Writes(_added), [_call(2), _call(4)])
    x, y = _call(3)
    result = tuned.model(x, y)
    assert torch.equal(result, x)
    kept = x.clone()
    result.zero_()
    assert torch.equal(x, kept)


def test_tensors_given_to_tune_are_left_alone(device: torch.device) -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True)).to(device)
    model: Any = ait.Module(module.eval(), strategy=ait.OneBackendStrategy("onnxruntime"))
    calls = [torch.randn(2, 5), torch.randn(4, 5)]
    kept = [call.clone() for call in calls]
    ait.tune(model, calls, device=device)
    for call, copy in zip(calls, kept, strict=True):
        assert torch.equal(call, copy)


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Replaced(nn.Module):
    """Puts another tensor in place of a buffer."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.last
        self.last = x[0].clone()
        return y


class Hidden(nn.Module):
    """Keeps state in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.last is None else x + self.last
        self.last = x.sum()
        return y


@pytest.mark.parametrize(("kind", "path"), [(Counter, "count"), (Replaced, "last"), (Hidden, None)])
def test_state_that_changes_on_each_call_is_refused_by_name(
    tune: Tune, kind: type[nn.Module], path: str | None
) -> None:
    with pytest.raises(ait.RecordingError) as caught:
        tune(kind(), [torch.randn(2, 3), torch.randn(4, 3)])
    if path is not None:
        assert caught.value.path == path
        assert repr(path) in str(caught.value)


def test_state_of_a_refused_module_is_that_of_its_recorded_calls(tune: Tune) -> None:
    module = Counter()
    tuned = tune(
        module, [torch.randn(2, 3)], wins=False, on_failure="eager", reference=nn.Identity()
    )
    before = int(module.count)
    tuned.model(torch.randn(2, 3))
    assert int(module.count) == before + 1


def test_cache_in_an_attribute_that_settles_is_no_state(tune: Tune) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(8.0)
            return x + self.table[: x.shape[1]]

    tuned = tune(Lazy(), [torch.randn(2, 4), torch.randn(3, 8)])
    tuned.same(torch.randn(2, 6))
