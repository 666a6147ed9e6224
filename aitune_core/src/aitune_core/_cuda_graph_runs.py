"""Runs of compiled programs that replay CUDA graphs: one at a time, in memory of their own."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from aitune_core._compiling import Program

__all__ = ["CudaGraphRuns"]


class CudaGraphRuns:
    """Calls a program whose results the next call overwrites.

    Inductor keeps its CUDA graphs per thread, and takes a call to follow the one before as long as
    results of that are alive. Here they are kept per engine, apart from those of the program around
    it, and results are copied, so that each call stands alone.

    Args:
        program: The program.
        device: Its CUDA device.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program = program
        self._device = device
        self._lock = threading.Lock()
        self._graphs: dict[str, Any] = {
            "tree_manager_containers": {},
            "tree_manager_locks": defaultdict(threading.Lock),
        }
        self._copied: torch.cuda.Event | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run, ordered on the caller's current stream; the results are copies."""
        with self._lock, torch.cuda.device(self._device), self._own_graphs():
            stream = torch.cuda.current_stream(self._device)
            if self._copied is None:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            else:
                # The graphs' memory may still be read on the stream of another caller.
                stream.wait_event(self._copied)
            results = [output.clone() for output in self._program(inputs)]
            self._copied.record(stream)
        return results

    @contextlib.contextmanager
    def _own_graphs(self) -> Iterator[None]:
        """Put the engine's graphs in place of those of this thread."""
        from torch._inductor import cudagraph_trees  # noqa: PLC0415 - heavy

        local = vars(cudagraph_trees.local)
        before = {name: local[name] for name in self._graphs if name in local}
        local.update(self._graphs)
        try:
            yield
        finally:
            for name in self._graphs:
                local.pop(name)
            local.update(before)
