"""Masks for rows of attention of which every key is hidden."""

from __future__ import annotations

import math

import pytest
import torch

from aitune_backend_onnxruntime.hidden_rows import Hiding, hiding

_FLOAT32 = torch.finfo(torch.float32)


def test_on_the_cpu_only_infinities_hide() -> None:
    query, mask = torch.zeros(2, 4), torch.tensor([0.0, -1e4, _FLOAT32.min, -math.inf])
    rows = hiding(query, query, mask)
    raised = rows.mask(mask, torch.float32)
    assert raised[:2].tolist() == [0.0, -1e4]
    assert _FLOAT32.min < raised[2] <= _FLOAT32.min * (1 - _FLOAT32.eps)
    assert raised[3] == -math.inf
    assert rows.hidden(torch.stack([mask, torch.full_like(mask, -math.inf)])).tolist() == [
        [False],
        [True],
    ]


@pytest.mark.parametrize("false", [-math.inf, -65504.0])
def test_bools_become_numbers_only_where_false_is_one(false: float) -> None:
    floor = torch.finfo(torch.float16).min + 32
    mask = torch.tensor([True, False])
    made = Hiding(limit=-math.inf, floor=floor, false=false).mask(mask, torch.float16)
    if math.isinf(false):
        assert made is mask
    else:
        assert made.dtype == torch.float16
        assert made.tolist() == [0.0, -65472.0]


def test_numbers_under_the_limit_stay() -> None:
    rows = Hiding(limit=-8.0, floor=-2.0, false=-math.inf)
    mask = torch.tensor([[-9.0, -8.0, -7.0, -2.0, 1.0, math.nan]])
    made = rows.mask(mask, torch.float32)
    torch.testing.assert_close(
        made, torch.tensor([[-9.0, -8.0, -2.0, -2.0, 1.0, math.nan]]), equal_nan=True
    )
    assert rows.hidden(mask[:, :2]).all()
    assert not rows.hidden(mask).any()
