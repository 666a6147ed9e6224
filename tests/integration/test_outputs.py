"""Results: values that stay, tensors of the caller's own, whatever they are made from."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Tune = Callable[..., Any]
Same = Callable[..., None]


class PassThrough(nn.Module):
    """Returns its inputs among its results, and views of them."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        return torch.ones(1) * 7, x, y + 1, {"again": x, "flat": y.view(-1), "row": x[0]}, x.t()


@pytest.fixture(scope="module")
def pass_through(tune_once: Tune) -> Any:
    return tune_once(PassThrough(), [(torch.randn(b, 3), torch.randn(b, 2)) for b in (2, 4)])


def test_inputs_and_views_of_them_are_results(pass_through: Any) -> None:
    pass_through.same(torch.randn(3, 3), torch.randn(3, 2))


def test_writing_to_a_result_changes_neither_inputs_nor_other_results(pass_through: Any) -> None:
    x, y = torch.randn(3, 3), torch.randn(3, 2)
    kept = x.clone()
    _, first, plus, named, transposed = pass_through.model(x, y)
    others = [tensor.clone() for tensor in (plus, named["again"], named["flat"], transposed)]
    first.fill_(99.0)
    named["row"].fill_(-1.0)
    assert torch.equal(x, kept)
    for now, then in zip((plus, named["again"], named["flat"], transposed), others, strict=True):
        assert torch.equal(now, then)


def test_writing_to_an_input_after_the_call_changes_no_result(pass_through: Any) -> None:
    x, y = torch.randn(3, 3), torch.randn(3, 2)
    _, first, _, named, transposed = pass_through.model(x, y)
    kept = x.clone()
    x.fill_(-5.0)
    assert torch.equal(first, kept)
    assert torch.equal(named["again"], kept)
    assert torch.equal(transposed, kept.t())


def test_identity(tune: Tune) -> None:
    tuned = tune(nn.Identity(), [torch.tensor([-0.5, 0.0, 0.5]), torch.randn(5)])
    x = torch.randn(4)
    result = tuned.same(x)
    result.zero_()
    assert not torch.equal(x, result)


def test_identity_of_scalar_and_of_integers(tune: Tune) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
            return x, n

    tuned = tune(Both(), [(torch.tensor(1.5), torch.arange(3))])
    tuned.same(torch.tensor(-2.25), torch.tensor([2**62, -1, 0]))


class Constants(nn.Module):
    """Results that depend on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("steps", torch.arange(4))
        self.plain = torch.tensor([0.5, 1.5])

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return (
            x * self.weight,
            self.weight,
            self.steps,
            self.plain,
            torch.tensor(1.5),
            torch.zeros(2, dtype=torch.int64),
            torch.full((x.shape[0], 2), 0.25),
        )


def test_constants_buffers_and_parameters_are_results(tune: Tune) -> None:
    module = Constants()
    tuned = tune(module, [torch.randn(2, 3), torch.randn(5, 3)])
    result = tuned.same(torch.randn(3, 3))
    weight, steps = module.weight.detach().clone(), result[2].clone()
    result[1].zero_()
    result[2].zero_()
    assert torch.equal(module.weight.detach(), weight)
    again = tuned.same(torch.randn(3, 3))
    assert torch.equal(again[1], weight)
    assert torch.equal(again[2], steps)


def test_results_that_depend_on_no_input_at_all(tune: Tune) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            del x
            return self.table.exp()

    tuned = tune(Fixed(), [torch.randn(2), torch.randn(5)])
    tuned.same(torch.randn(3))


def test_module_that_takes_nothing(tune: Tune) -> None:
    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(2, 2))

        def forward(self) -> Tensor:
            return self.table.exp()

    tuned = tune(Source(), [((), {})])
    tuned.same()


def test_names_of_attributes_and_results_do_not_meet_those_of_operators(tune: Tune) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.tensor([0.1, 0.2, 0.3])
            self.sub = torch.tensor(2.0)
            self.softmax = nn.Parameter(torch.randn(3))
            self.add = nn.Linear(3, 3)
            self.input_0 = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            mean = x.mean(-1, keepdim=True)
            y = torch.softmax(x - self.mean, -1) * self.softmax
            return {"softmax": self.add(y - mean) - self.sub, "mean": mean.mean(0) + self.input_0}

    tuned = tune(Named(), [torch.randn(2, 3), torch.randn(5, 3)])
    tuned.same(torch.randn(3, 3))


def test_one_tensor_returned_twice_is_two_tensors(tune: Tune) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = x * 2
            return y, y, y[1:]

    tuned = tune(Both(), [torch.randn(2, 3), torch.randn(5, 3)])
    first, second, third = tuned.same(torch.randn(3, 3))
    kept = second.clone()
    first.zero_()
    assert torch.equal(second, kept)
    assert torch.equal(third, kept[1:])


class Layers(nn.Module):
    """Several results, one of them an input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.mix(x)
        return hidden, torch.relu(hidden), x


def test_later_calls_change_no_earlier_result(tune: Tune, same: Same) -> None:
    tuned = tune(Layers(), [torch.randn(2, 8), torch.randn(6, 8)])
    inputs = [torch.randn(rows, 8) for rows in (3, 3, 6, 2, 5, 3)]
    results = [tuned.same(x) for x in inputs]
    copies = [tuple(tensor.clone() for tensor in result) for result in results]
    for x in inputs:
        tuned.model(x)
    for x, result, kept in zip(inputs, results, copies, strict=True):
        same(kept, result)
        same(tuned.expected(x), result)


def test_results_outlive_the_module(tune: Tune, same: Same) -> None:
    tuned = tune(Layers(), [torch.randn(2, 8), torch.randn(6, 8)])
    x = torch.randn(4, 8)
    expected = tuned.expected(x)
    result = tuned.model(x)
    del tuned
    gc.collect()
    filler = [torch.full((4, 8), 7.0) for _ in range(64)]
    same(expected, result)
    assert len(filler) == 64


def test_results_carry_no_gradient_whatever_the_grad_mode(tune: Tune) -> None:
    tuned = tune(Layers(), [torch.randn(2, 8), torch.randn(6, 8)])
    x = torch.randn(3, 8)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            assert not any(tensor.requires_grad for tensor in tuned.model(x))
    assert tuned.eager_calls == 0
    error = tuned.misses(x.clone().requires_grad_())
    assert error.path == "x"
    with torch.no_grad():
        tuned.model(x.clone().requires_grad_())
    assert tuned.eager_calls == 0


def test_results_of_inference_mode_and_inputs_from_it_are_plain(tune: Tune) -> None:
    tuned = tune(Layers(), [torch.randn(2, 8), torch.randn(6, 8)])
    with torch.inference_mode():
        x = torch.randn(3, 8)
        inside = tuned.model(x)
    outside = tuned.model(x)
    for one, other in zip(inside, outside, strict=True):
        assert torch.equal(one, other)


@pytest.mark.cpu_only
def test_float32_result_that_is_widened_is_judged_as_float32(tune: Tune) -> None:
    class Widened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mix(x).double()
            return y

    tuned = tune(Widened(), [torch.randn(2, 8), torch.randn(6, 8)])
    assert tuned.model(torch.randn(3, 8)).dtype is torch.float64
