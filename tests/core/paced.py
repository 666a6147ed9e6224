"""A module and backends that take the time that they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from fakes import FakeBackend, FakeEngine, Fault
from torch import Tensor, nn

from aitune_core import BuildRequest, Engine, EngineTable


class Slow(nn.Module):
    """Takes 2 ms and a quarter of one for each row."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002 + 0.00025 * x.shape[0])
        return x * 2


class PacedEngine(FakeEngine):
    """Doubles its input and takes the time that it is told."""

    fixed_ms = row_ms = 0.0
    power = 1.0
    most_rows = 10**6

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = inputs[0].shape[0]
        if rows > self.most_rows and threading.current_thread().name == "timing":
            msg = "CUDA out of memory. Tried to allocate 2.00 GiB"
            raise torch.OutOfMemoryError(msg)
        time.sleep((self.fixed_ms + self.row_ms * rows**self.power) / 1e3)
        return [inputs[0] * 2]

    def tables(self) -> Sequence[EngineTable]:
        return (EngineTable("pace", ("what", "ms"), (("call", self.fixed_ms),)),)


class PacedBackend(FakeBackend):
    """Builds engines that take ``fixed_ms`` and ``row_ms`` for each row."""

    def __init__(
        self, fixed_ms: float = 0.0, row_ms: float = 0.0, *, build_ms: float = 0.0, **options: Any
    ) -> None:
        super().__init__(label=f"{fixed_ms} {row_ms}")
        self.pace = {"fixed_ms": fixed_ms, "row_ms": row_ms, **options}
        self.build_ms = build_ms

    def build(self, request: BuildRequest) -> Engine:
        time.sleep(self.build_ms / 1e3)
        engine = PacedEngine(request, self.name, Fault.NONE)
        vars(engine).update(self.pace)
        self.built.append(engine)
        return engine
