"""Batch sizes: which there are, and how executables do at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from aitune_core._measurement import Contest, Executable
from aitune_core._stopwatch import Stopwatch
from aitune_core.results import BatchPoint
from aitune_core.specs import BatchDim, DynamicDim, GraphSpec

__all__ = ["batch_dim", "batch_sizes", "is_out_of_memory", "rows_of", "sweep"]

_ROUNDS: Final = 5
#: Samples per second have stopped growing when two sizes in a row give no more than this.
_GROWTH: Final = 1.02
_MEMORY_TEXTS: Final = ("out of memory", "allocate memory", "bad_alloc", "bad allocation")


def batch_dim(graph: GraphSpec) -> DynamicDim | None:
    """Return the dim along which samples are stacked; None where the graph has none."""
    return next((dim for dim in graph.dims.values() if isinstance(dim, BatchDim)), None)


def rows_of(graph: GraphSpec, inputs: Sequence[Tensor]) -> int:
    """Return how many samples a call holds: its batch dim, else axis 0 of its first input."""
    dim = batch_dim(graph)
    if dim is not None:
        return graph.dim_sizes(inputs)[dim.name]
    return next((tensor.shape[0] for tensor in inputs if tensor.dim()), 1)


def batch_sizes(graph: GraphSpec, accepts: Callable[[Mapping[str, int]], bool]) -> list[int]:
    """Return batch sizes that double from the least of the range, with its end, and the usual one.

    Args:
        graph: The graph.
        accepts: Whether sizes of all dims are taken, others at their usual size.
    """
    dim = batch_dim(graph)
    if dim is None:
        return []
    sizes = {max(1, dim.min), dim.max, dim.opt or dim.max}
    size = 1
    while size < dim.max:
        sizes.add(max(size, dim.min))
        size *= 2
    return [size for size in sorted(sizes) if size and accepts({dim.name: size})]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that memory ended."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if any(words in text for words in _MEMORY_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


@attrs.define
class _Runner:
    """One executable on its way through the sizes."""

    at: Callable[[int], Executable]
    points: list[BatchPoint] = attrs.field(factory=list)
    best: float = 0.0
    flat: int = 0
    running: bool = True
    error: Exception | None = None

    def note(self, point: BatchPoint) -> None:
        self.points.append(point)
        reached = point.samples_per_second or 0.0
        self.flat = 0 if reached > self.best * _GROWTH else self.flat + 1
        self.best = max(self.best, reached)
        self.running = self.flat < 2  # noqa: PLR2004 - two sizes in a row

    def fail(self, size: int, error: Exception) -> None:
        self.running = False
        if is_out_of_memory(error):
            self.points.append(BatchPoint(batch_size=size, error="out of memory"))
        else:
            self.error = error


def sweep(
    executables: Sequence[Callable[[int], Executable]],
    sizes: Sequence[int],
    stopwatch: Stopwatch,
    *,
    burst: bool,
    seconds_left: Callable[[], float | None],
) -> list[tuple[tuple[BatchPoint, ...], Exception | None]]:
    """Time executables at batch sizes that grow, each until it gets no more samples through.

    Args:
        executables: Makes each executable for a batch size.
        sizes: Batch sizes, growing.
        stopwatch: What times them.
        burst: As that of `Contest`.
        seconds_left: Seconds in which a further size may begin; None is no limit.

    Returns:
        For each executable its points, and what ended it, if that was not memory.
    """
    runners = [_Runner(at) for at in executables]
    for size in sizes:
        left = seconds_left()
        if left is not None and left <= 0 and any(runner.points for runner in runners):
            break
        _at_size([runner for runner in runners if runner.running], size, stopwatch, burst=burst)
    return [(tuple(runner.points), runner.error) for runner in runners]


def _at_size(runners: Sequence[_Runner], size: int, stopwatch: Stopwatch, *, burst: bool) -> None:
    ready: list[tuple[_Runner, Executable]] = []
    for runner in runners:
        try:
            ready.append((runner, runner.at(size)))
        except Exception as error:  # noqa: BLE001 - making the inputs may end memory
            runner.fail(size, error)
    if not ready:
        return
    contest = Contest([executable for _, executable in ready], stopwatch, burst=burst)
    contest.run(rounds=_ROUNDS)
    for place, (runner, _) in enumerate(ready):
        failure = contest.error(place)
        if failure is not None:
            runner.fail(size, failure)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        timed = contest.measurement(place)
        runner.note(
            BatchPoint(
                batch_size=size,
                p50_ms=timed.p50_ms,
                p90_ms=timed.p90_ms,
                p99_ms=timed.p99_ms,
                samples_per_second=timed.samples_per_second,
                peak_memory_bytes=timed.peak_memory_bytes,
            )
        )
