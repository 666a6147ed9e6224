"""Rows of attention that a mask hides wholly come out as eager's kernels make them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aitune_core as ait

pytestmark = pytest.mark.gpu


class Masked(nn.Module):
    """Attention of all rows but those of which nothing is to be seen."""

    def __init__(self, number: float | None) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Hide what is not seen: by False, by a share of the lowest number, or by a number."""
        mask = seen[:, None, None].expand(-1, -1, x.shape[2], -1)
        if self.number is not None:
            lowest = torch.finfo(x.dtype).min
            number = self.number * -lowest if -1 <= self.number < 0 else self.number
            mask = torch.where(mask, 0.0, number).to(x.dtype)
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def _call(rows: int, length: int, size: int, dtype: torch.dtype, hidden: int = 0) -> list[Tensor]:
    x = torch.randn(rows, 2, length, size, device="cuda").to(dtype)
    seen = torch.rand(rows, length, device="cuda") > 0.3
    seen[:, 0] = True
    seen[:hidden] = False
    return [x, seen]


@pytest.mark.parametrize("opset", [23, 20])
@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("number", [None, -1.0, -0.5, -1e9, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_that_a_mask_hides_are_eagers(
    dtype: torch.dtype, number: float | None, size: int, opset: int
) -> None:
    if opset < 23 and dtype != torch.float32:
        pytest.skip("parts of attention round in half precision")
    module = Masked(number).eval()
    strategy = ait.OneBackendStrategy(
        ("onnxruntime", {"execution_provider": "cuda", "opset_version": opset})
    )
    model = ait.Module(module, strategy=strategy, on_miss="error")
    ait.tune(model, [tuple(_call(2, 8, size, dtype)), tuple(_call(4, 40, size, dtype))])
    allowed = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for hidden in (0, 1, 3):
        call = _call(3, 24, size, dtype, hidden)
        torch.testing.assert_close(model(*call), module(*call), atol=allowed, rtol=allowed)


class Cast(nn.Module):
    """Attention of float32 that casts by itself."""

    def __init__(self, number: float | None) -> None:
        super().__init__()
        self.masked = Masked(number)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Attend in bfloat16."""
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y: Tensor = self.masked(x, seen)
        return y


@pytest.mark.parametrize("number", [None, -1.0, -0.5])
def test_attention_that_casts_by_itself(number: float | None) -> None:
    module = Cast(number).eval()
    strategy = ait.OneBackendStrategy(("onnxruntime", {"execution_provider": "cuda"}))
    model = ait.Module(module, strategy=strategy, on_miss="error")
    ait.tune(model, [tuple(_call(rows, 24, 64, torch.float32)) for rows in (2, 4)])
    call = _call(3, 24, 64, torch.float32, 2)
    torch.testing.assert_close(model(*call), module(*call), atol=6e-2, rtol=6e-2)
