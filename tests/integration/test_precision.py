"""Modules of float32 that engines compute in half precision, and stay as they are."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aitune_core as ait

pytestmark = pytest.mark.cpu_only


def tuned(module: nn.Module, calls: list[Any], **options: Any) -> ait.Module:
    model = ait.Module(
        module.eval(),
        strategy=ait.OneBackendStrategy(("onnxruntime", {"precision": "fp16", **options})),
        on_miss="error",
    )
    ait.tune(model, calls, device="cpu")
    return model


class Tied(nn.Module):
    """Embedding and output share a weight; attention, normalisation and an integer result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.attend = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        q, k, v = self.attend(x).chunk(3, -1)
        x = self.norm(x + functional.scaled_dot_product_attention(q, k, v))
        return {"scores": self.head(x), "length": (ids > 0).sum(-1)}


class Scale(nn.Module):
    """Scales up by more than half precision can hold, and down again."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(1e6))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * self.factor).relu() / self.factor


def grows() -> nn.Module:
    parts = OrderedDict(before=nn.Linear(8, 8), scale=Scale(), after=nn.Linear(8, 8))
    return nn.Sequential(parts)


class InPlace(nn.Module):
    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        state.add_(x)
        return x * 2


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), [(2, 8), (5, 8)]),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), [(2, 3, 9, 9)]),
    ],
    ids=["mlp", "convolution"],
)
def test_results_are_float32_and_near_eagers(module: nn.Module, calls: list[Any]) -> None:
    before = copy.deepcopy(module.state_dict())
    model = tuned(module, [torch.randn(shape) for shape in calls])
    x = torch.randn(calls[-1])
    result = model(x)
    assert result.dtype is torch.float32
    expected = module(x)
    assert not torch.equal(result, expected)  # it was computed in half precision
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype is before[name].dtype
        assert value.data_ptr() == dict(module.state_dict())[name].data_ptr()


def test_tied_weights_stay_tied_and_integers_exact() -> None:
    module = Tied()
    model = tuned(module, [torch.randint(0, 40, (2, 7)), torch.randint(0, 40, (3, 7))])
    ids = torch.randint(0, 40, (3, 7))
    result, expected = model(ids), module(ids)
    torch.testing.assert_close(result["scores"], expected["scores"], atol=3e-2, rtol=3e-2)
    assert torch.equal(result["length"], expected["length"])
    assert module.head.weight is module.embed.weight


def test_change_in_place_reaches_the_callers_float32_tensor() -> None:
    calls = [(torch.randn(2, 4), torch.randn(2, 4))]
    model = tuned(InPlace(), calls)
    x, state = torch.randn(2, 4), torch.randn(2, 4)
    expected = state + x
    assert model(x, state).dtype is torch.float32
    torch.testing.assert_close(state, expected, atol=1e-2, rtol=1e-2)


def test_report_says_in_what_it_computes() -> None:
    model = ait.Module(
        nn.Linear(4, 4).eval(),
        strategy=ait.OneBackendStrategy(("onnxruntime", {"precision": "FP16"})),
    )
    assert "computes in float16" in str(ait.tune(model, [torch.randn(2, 4)], device="cpu"))


def test_part_that_overflows_is_named_and_can_stay_in_float32() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ait.TuningError) as caught:
        tuned(grows(), [x])
    assert "part 'scale' overflows" in str(caught.value)
    assert "float32_parts" in str(caught.value)
    module = grows()
    model = tuned(module, [x], float32_parts=("scale",))
    y = torch.randn(3, 8)
    torch.testing.assert_close(model(y), module(y), atol=2e-2, rtol=2e-2)


def test_unknown_part_is_refused_with_near_names() -> None:
    with pytest.raises(ait.TuningError, match=r"'scales', which is no part.*'scale'"):
        tuned(grows(), [torch.randn(3, 8)], float32_parts=("scales",))


def test_half_precision_that_the_provider_lacks_is_an_error() -> None:
    with pytest.raises(ait.TuningError, match="has no kernel"):
        tuned(nn.Linear(8, 8), [torch.randn(3, 8)], precision="bf16")


def test_loaded_engine_computes_the_same_in_another_process(tmp_path: Path) -> None:
    model = tuned(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), [torch.randn(3, 8)])
    x = torch.randn(3, 8)
    ait.save(model, tmp_path / "model.ait")
    torch.save((x, model(x)), tmp_path / "expected.pt")
    script = """
import sys, torch, aitune_core as ait
x, expected = torch.load(sys.argv[2])
model = ait.load(sys.argv[1], device="cpu")
assert torch.equal(model(x), expected)
assert model._aitune.dispatcher.graphs[0].engine.compute_dtype is torch.float16
"""
    command = [sys.executable, "-c", script]
    command += [str(tmp_path / "model.ait"), str(tmp_path / "expected.pt")]
    subprocess.run(command, check=True, timeout=300)
