"""Many calls over many shapes: memory stays where it was after the first ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from aitune_core.specs import DynamicDim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CALLS: Final = 200_000
WARM_UP_CALLS: Final = 2_000
SHAPES: Final = 50
CHECKED_EVERY: Final = 997
#: Room for what the process does besides: bytes of host memory, and of device memory.
HOST_SLACK: Final = 16 * 2**20
DEVICE_SLACK: Final = 2 * 2**20


def memory() -> dict[str, int]:
    """Return bytes in use: of the process, of that pinned, on the device."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmPin", "VmLck")}
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return {
        "host": kib["VmRSS"] * 1024,
        "pinned": (kib["VmPin"] + kib["VmLck"]) * 1024 + pinned,
        "device": total - free,
    }


@pytest.mark.parametrize("cuda_graphs", ["auto", False])
def test_memory_does_not_grow(make: Callable[..., Any], cuda_graphs: str | bool) -> None:
    batch = DynamicDim("batch", 1, SHAPES, 8)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    made = make(module, torch.randn(8, 64), axes=[{0: batch}], out_axes=[{0: batch}])
    engine = made.build(cuda_graphs=cuda_graphs)
    inputs = {size: torch.randn(size, 64, device="cuda") for size in range(1, SHAPES + 1)}
    expected = {size: made.eager(x)[0] for size, x in inputs.items()}
    sizes = random.Random(0)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    start: dict[str, int] = {}
    for call in range(CALLS):
        size = sizes.randint(1, SHAPES)
        (result,) = engine([inputs[size]])
        if call % CHECKED_EVERY == 0:
            wrong += (result - expected[size]).abs().max() > 1e-3
        if call == WARM_UP_CALLS:
            start = memory()
    end = memory()
    print(f"cuda_graphs={cuda_graphs}: after {WARM_UP_CALLS} calls {start}, after {CALLS} {end}")
    assert int(wrong) == 0
    assert end["host"] - start["host"] < HOST_SLACK
    assert end["pinned"] - start["pinned"] < HOST_SLACK
    assert end["device"] - start["device"] < DEVICE_SLACK
