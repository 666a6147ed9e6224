"""A tuned module is still the module it was: modes, state, hooks, copies, parts."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]
STRATEGY = ait.OneBackendStrategy("onnxruntime")


class Mixed(nn.Module):
    """Dropout and batch norms, of which one may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.drop, self.frozen = nn.Dropout(0.5), nn.BatchNorm1d(6)
        self.norm.get_buffer("running_mean").normal_()
        self.frozen.get_buffer("running_var").uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.drop(self.norm(self.mix(x))))
        return y


def test_module_in_training_mode_is_tuned_as_in_eval_mode_and_told_so(
    device: torch.device,
) -> None:
    module = Mixed().to(device).train()
    module.frozen.eval()
    state = copy.deepcopy(module.state_dict())
    reference = copy.deepcopy(module).eval()
    model: Any = ait.Module(module, strategy=STRATEGY, on_miss="error")
    report = ait.tune(model, [torch.randn(4, 6), torch.randn(8, 6)], device=device)
    assert any("eval mode" in note for note in report.modules[0].notes)
    x = torch.randn(6, 6)
    assert torch.allclose(model(x), reference(x), atol=1e-5)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_parts_keep_their_modes_when_the_module_is_in_eval_mode(device: torch.device) -> None:
    module = Mixed().to(device).eval()
    module.norm.training = True
    module.norm.momentum = 0.0
    flags = {name: part.training for name, part in module.named_modules()}
    model: Any = ait.Module(module, strategy=STRATEGY, on_miss="error")
    try:
        ait.tune(model, [torch.randn(4, 6), torch.randn(8, 6)], device=device)
    except ait.AituneError as error:
        assert "norm" in str(error)
    assert {name: part.training for name, part in module.named_modules()} == flags


def test_modes_of_parts_are_what_they_were_after_a_tuning_that_failed(
    device: torch.device,
) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else self.drop(-x)

    module = Branch().eval()
    model: Any = ait.Module(module, strategy=STRATEGY)
    with pytest.raises(ait.TuningError):
        ait.tune(model, [torch.ones(2, 3), -torch.ones(2, 3)], device=device)
    assert not module.training
    assert not module.drop.training
    assert torch.backends.mha.get_fastpath_enabled()


def test_training_mode_after_tuning_is_eager_and_eval_mode_tuned_again(tune: Tune) -> None:
    tuned = tune(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), [torch.randn(4, 6)])
    x = torch.randn(4, 6)
    tuned.model.train()
    tuned.model(torch.randn(7, 6)).sum().backward()
    assert tuned.eager_calls == 1
    tuned.model.eval()
    tuned.same(x)


@pytest.mark.parametrize("kind", ["noise", "dropout", "rand"])
def test_random_numbers_in_forward_are_refused(tune: Tune, kind: str) -> None:
    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if kind == "noise":
                return x + torch.randn_like(x)
            if kind == "rand":
                return x * torch.rand(x.shape[0], 1)
            return F.dropout(x, 0.5, training=True)

    with pytest.raises(ait.RecordingError) as caught:
        tune(Random(), [torch.randn(4, 8)])
    assert caught.value.path == "out"
    assert "random" in str(caught.value)


def test_tuning_leaves_the_random_state_of_the_caller_alone(tune: Tune) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    module, calls = nn.Linear(3, 3), [torch.randn(2, 3), torch.randn(4, 3)]
    torch.manual_seed(5)
    tune(module, calls)
    assert torch.equal(torch.rand(3), expected)


def test_calls_under_autocast_are_misses_and_tuning_under_autocast_is_refused(
    tune: Tune, device: torch.device
) -> None:
    tuned = tune(nn.Linear(4, 4), [torch.randn(2, 4)])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        error = tuned.misses(torch.randn(2, 4))
    assert error.path == "autocast"
    tuned.same(torch.randn(2, 4))
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        pytest.raises(ait.RecordingError) as caught,
    ):
        tune(nn.Linear(4, 4), [torch.randn(2, 4)])
    assert "autocast" in str(caught.value)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_tuning_works_in_every_grad_mode(tune: Tune, context: Callable[[], Any]) -> None:
    with context():
        tuned = tune(nn.Linear(4, 4), [torch.randn(2, 4), torch.randn(5, 4)])
    tuned.same(torch.randn(3, 4))


def test_hooks_run_exactly_once_around_a_tuned_call(tune: Tune) -> None:
    tuned = tune(nn.Linear(4, 4), [torch.randn(2, 4)])
    log: list[str] = []

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        log.append("before")
        return args, kwargs

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Tensor) -> Tensor:
        log.append("after")
        return output + 1

    tuned.model.register_forward_pre_hook(before, with_kwargs=True)
    tuned.model.register_forward_hook(after, with_kwargs=True)
    x = torch.randn(2, 4)
    assert torch.allclose(tuned.model(x), tuned.expected(x) + 1, atol=1e-5)
    assert torch.allclose(tuned.model(input=x), tuned.expected(x) + 1, atol=1e-5)
    assert log == ["before", "after"] * 2
    assert tuned.eager_calls == 0


def test_deep_copy_is_eager_and_right_and_the_original_stays_tuned(tune: Tune) -> None:
    tuned = tune(nn.Linear(4, 4), [torch.randn(2, 4)])
    # The counter of this test's fixture is an attribute of the module, not part of a copy.
    del tuned.model.__dict__["forward"]
    copied = copy.deepcopy(tuned.model)
    x = torch.randn(7, 4)
    assert torch.equal(copied(x), tuned.eager(x))
    with torch.no_grad():
        copied.weight.zero_()
    tuned.same(torch.randn(2, 4))


def test_pickle_of_a_tuned_module_names_the_way_out(tune: Tune) -> None:
    tuned = tune(nn.Linear(4, 4), [torch.randn(2, 4)])
    with pytest.raises(TypeError, match="save"):
        pickle.dumps(tuned.model)


class Block(nn.Module):
    """A part with the same leaf name as in other blocks, called several times."""

    def __init__(self, width: int, rounds: int = 1) -> None:
        super().__init__()
        self.mlp, self.rounds = nn.Linear(width, width), rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = torch.tanh(self.mlp(x)) + x
        return x


class Stack(nn.Module):
    """Two blocks, one of which serves twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(5), Block(5, rounds=3)
        self.shared = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(self.decoder(self.encoder(x)))
        return y


def test_parts_that_are_shared_or_have_one_leaf_name_or_run_many_times(tune: Tune) -> None:
    tuned = tune(Stack(), [torch.randn(2, 5), torch.randn(6, 5)])
    tuned.same(torch.randn(4, 5))


def test_two_wrapped_parts_of_a_pipeline_with_one_leaf_name(device: torch.device) -> None:
    net = Stack().to(device).eval()
    reference = copy.deepcopy(net)
    parts: list[Any] = [
        ait.Module(block.mlp, strategy=STRATEGY, on_miss="error")
        for block in (net.encoder, net.decoder)
    ]
    net.encoder.mlp, net.decoder.mlp = parts
    report = ait.tune(net, [torch.randn(2, 5), torch.randn(6, 5)], device=device)
    assert len(report.modules) == 2
    assert all(module.tuned for module in report.modules)
    x = torch.randn(4, 5)
    with torch.no_grad():
        assert torch.allclose(net(x), reference(x), atol=1e-5)


def test_tuning_of_another_module_changes_nothing(tune: Tune, device: torch.device) -> None:
    first = tune(nn.Linear(4, 4), [torch.randn(2, 4), torch.randn(6, 4)])
    second = tune(nn.Linear(4, 4), [torch.randn(2, 4), torch.randn(6, 4)])
    x = torch.randn(3, 4)
    assert not torch.allclose(first.same(x), second.same(x))
    ait.tune(second.model, [torch.randn(9, 4)], device=device)
    first.same(x)
    assert second.misses(x).path == "input"


def test_tuning_again_replaces_the_graphs(tune: Tune, device: torch.device) -> None:
    tuned = tune(nn.Linear(4, 4), [torch.randn(2, 4)])
    ait.tune(tuned.model, [torch.randn(3, 4), torch.randn(5, 4)], device=device)
    tuned.eager_calls = 0
    tuned.same(torch.randn(4, 4))
    assert tuned.misses(torch.randn(2, 4)).got == 2


def test_changed_weights_are_noticed(tune: Tune) -> None:
    tuned = tune(nn.Linear(4, 4), [torch.randn(2, 4)])
    with torch.no_grad():
        tuned.model.weight.mul_(2)
        tuned.eager.weight.mul_(2)
    x = torch.randn(2, 4)
    with pytest.warns(ait.MissWarning, match="weights"):
        got = tuned.model(x)
    assert torch.equal(got, tuned.eager(x))


class WeightNorms(nn.Module):
    """Weight norm and spectral norm, as hooks and as parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.old = nn.utils.weight_norm(nn.Conv1d(3, 4, 3, padding=1))
            self.old_spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.new(self.old(x).mean(-1))
        result: Tensor = self.spectral(y) + self.old_spectral(y)
        return result


class Vector(nn.Module):
    """A weight with one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -2.0, 3.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_weight_norm_and_spectral_norm_of_both_kinds(tune: Tune) -> None:
    module = WeightNorms().eval()
    reference = WeightNorms().eval()
    reference.load_state_dict(module.state_dict())
    state = copy.deepcopy(module.state_dict())
    calls = [torch.randn(2, 3, 5), torch.randn(3, 3, 7)]
    tuned = tune(module, calls, reference=reference)
    tuned.same(torch.randn(2, 3, 6))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("use_dynamo", [True, False])
def test_weight_norm_of_a_vector(tune: Tune, dim: int, *, use_dynamo: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(Vector(), dim=dim)
    new = nn.utils.parametrizations.weight_norm(Vector(), dim=dim)
    module = nn.Sequential(old, new).eval()
    x = torch.randn(3, 4)
    expected = module(x).detach()
    calls = [torch.randn(2, 4), torch.randn(5, 4)]
    tuned = tune(module, calls, reference=module, options={"use_dynamo": use_dynamo})
    assert torch.allclose(tuned.model(x), expected, atol=1e-6)


def test_tied_weights_are_stored_once(tune: Tune, tmp_path: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4000, 32), nn.Linear(32, 4000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(torch.tanh(self.embed(ids)))
            return y

    tuned = tune(Tied(), [torch.randint(0, 4000, (2, 3)), torch.randint(0, 4000, (3, 5))])
    tuned.same(torch.randint(0, 4000, (2, 4)))
    ait.save(tuned.model, tmp_path / "tied.ait")
    size = (tmp_path / "tied.ait").stat().st_size
    assert size < 1.2 * 4000 * 32 * 4, f"{size} bytes"


class Sign(nn.Module):
    """No exporter takes it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x * 2


class Complex(nn.Module):
    """The tracer cannot take it."""

    def forward(self, x: Tensor) -> Tensor:
        size: Tensor = torch.fft.rfft(x).abs()
        return size


def test_nothing_is_printed_or_logged_while_tuning(
    tune: Tune, capfd: pytest.CaptureFixture[str]
) -> None:
    tune(nn.Linear(4, 4), [torch.randn(2, 4), torch.randn(5, 4)])
    for module in (Sign(), Complex()):
        tune(module, [torch.ones(2), -torch.ones(2)], on_failure="eager", wins=False)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
