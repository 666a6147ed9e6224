from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fakes import Fault
from paced import PacedBackend, PacedEngine, Slow
from samples import batches, recorded
from torch import Tensor, nn

from aitune_core import (
    BuildRequest,
    CandidateRejectedError,
    ConfigError,
    Engine,
    EngineTable,
    Limits,
    Outcome,
)
from aitune_core._sweep import batch_sizes, is_out_of_memory
from aitune_core._trial import GraphTrial


def trial(*sizes: int, module: Any = None, limits: Limits | None = None, **more: Any) -> GraphTrial:
    (graph,) = recorded(module or Slow(), *((x,) for x in batches(*sizes)))
    more = {"started": lambda _: None, "finished": lambda _: None, **more}
    return GraphTrial("net", graph, (), torch.device("cpu"), limits=limits, **more)


def built(graph_trial: GraphTrial, *backends: PacedBackend) -> list[Outcome]:
    return [graph_trial.build(backend) for backend in backends]


def test_candidates_are_timed_beside_eager_and_each_other() -> None:
    graph_trial = trial(2)
    fast, slow = graph_trial.measure(built(graph_trial, PacedBackend(1), PacedBackend(8)))
    assert fast.measurement is not None
    assert slow.measurement is not None
    assert graph_trial.eager is not None
    assert 1.0 <= fast.measurement.p50_ms < graph_trial.eager.p50_ms < slow.measurement.p50_ms
    assert graph_trial.compare(fast).faster
    assert graph_trial.compare(slow).slower
    assert graph_trial.compare(fast, slow).value == pytest.approx(
        1 / graph_trial.compare(slow, fast).value
    )
    assert fast.ratio == graph_trial.compare(fast)
    assert graph_trial.outcomes == [fast, slow]


def test_what_engines_say_of_themselves_is_kept() -> None:
    (outcome,) = built(trial(2), PacedBackend(0.5))
    assert outcome.tables == (EngineTable("pace", ("what", "ms"), (("call", 0.5),)),)


def test_comparing_comes_after_measuring() -> None:
    graph_trial = trial(2)
    (outcome,) = built(graph_trial, PacedBackend())
    with pytest.raises(RuntimeError, match="after measure"):
        graph_trial.compare(outcome)


def test_sweep_doubles_batch_sizes_until_throughput_stops_growing() -> None:
    graph_trial = trial(1, 64)
    level, growing = graph_trial.sweep(
        built(graph_trial, PacedBackend(row_ms=2.0, power=1.5), PacedBackend(fixed_ms=4.0))
    )
    assert graph_trial.eager is not None
    assert [point.batch_size for point in graph_trial.eager.batches] == [1, 2, 4, 8, 16, 32, 64]
    assert level.measurement is not None
    assert growing.measurement is not None
    assert [point.batch_size for point in level.measurement.batches] == [1, 2, 4]
    assert [point.batch_size for point in growing.measurement.batches][-1] == 64
    rates = [point.samples_per_second or 0.0 for point in growing.measurement.batches]
    assert rates == sorted(rates)
    assert growing.measurement.batch_size == 64


def test_sweep_outlives_the_end_of_memory() -> None:
    graph_trial = trial(1, 16)
    outcomes = built(graph_trial, PacedBackend(4.0, most_rows=4), PacedBackend(4.0))
    swept: list[Outcome] = []
    thread = threading.Thread(
        target=lambda: swept.extend(graph_trial.sweep(outcomes)), name="timing"
    )
    thread.start()
    thread.join()
    small, large = swept
    assert small.measurement is not None
    assert large.measurement is not None
    assert [(p.batch_size, p.error) for p in small.measurement.batches] == [
        (1, ""),
        (2, ""),
        (4, ""),
        (8, "out of memory"),
    ]
    assert small.measurement.batch_size == 4
    assert large.measurement.batches[-1].batch_size == 16
    again = graph_trial.measure([small, large], [16, 4, 16])
    assert [outcome.succeeded for outcome in again] == [True, True]
    assert again[0].measurement is not None
    assert again[0].measurement.batches == small.measurement.batches
    assert graph_trial.compare(again[1], again[0]).faster


def test_candidate_that_breaks_while_it_is_timed_has_failed_and_is_closed() -> None:
    class Breaks(PacedEngine):
        def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            if self.runs < 0:
                msg = "worn out"
                raise RuntimeError(msg)
            return super().run(inputs)

    class BreaksBackend(PacedBackend):
        def build(self, request: BuildRequest) -> Engine:
            engine = Breaks(request, self.name, Fault.NONE)
            self.built.append(engine)
            return engine

    graph_trial = trial(2)
    backend, good = BreaksBackend(), PacedBackend(1)
    outcomes = built(graph_trial, backend, good)
    backend.built[0].runs = -1
    broken, fine = graph_trial.measure(outcomes)
    assert "worn out" in str(broken.error)
    assert backend.built[0].releases == 1
    assert fine.measurement is not None
    assert graph_trial.outcomes == [broken, fine]


def test_graph_without_batch_dim_has_no_sweep() -> None:
    graph_trial = trial(4)
    outcomes = built(graph_trial, PacedBackend())
    (outcome,) = graph_trial.sweep(outcomes)
    assert outcome.measurement is None
    assert graph_trial.eager is None


@pytest.mark.parametrize(
    ("low", "high", "sizes"),
    [
        (1, 1024, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        (3, 20, [3, 4, 8, 16, 20]),
        (0, 5, [1, 2, 4, 5]),
        (6, 7, [6, 7]),
    ],
)
def test_batch_sizes_double_within_the_range(low: int, high: int, sizes: list[int]) -> None:
    (graph,) = recorded(nn.Identity(), *((torch.ones(size, 4),) for size in (low, high)))
    assert batch_sizes(graph.spec, lambda _: True) == sizes
    assert batch_sizes(graph.spec, lambda some: some["batch"] != high) == sizes[:-1]


@pytest.mark.parametrize(
    ("rule", "limit", "backend"),
    [
        ("max_build_seconds", 0.02, PacedBackend(build_ms=40)),
        ("max_memory_bytes", 1, None),
    ],
)
def test_candidate_that_breaks_a_limit_has_failed_and_is_closed(
    rule: str, limit: float, backend: PacedBackend | None
) -> None:
    class Hungry(PacedBackend):
        def build(self, request: BuildRequest) -> Engine:
            self.held = torch.ones(32 * 2**20 // 4)
            return super().build(request)

    candidate = backend or Hungry()
    outcome = trial(2, limits=Limits.of(**{rule: limit})).evaluate(candidate)
    assert isinstance(outcome.error, CandidateRejectedError)
    assert (outcome.error.rule, outcome.error.limit) == (rule, limit)
    assert not outcome.succeeded
    assert candidate.built[0].releases == 1


def test_no_candidate_begins_when_the_time_is_over() -> None:
    late = PacedBackend()
    graph_trial = trial(2, limits=Limits(time_limit_s=5.0), deadline=time.perf_counter() - 1.0)
    outcome = graph_trial.evaluate(late)
    assert outcome.not_tried == "time_limit_s = 5 is over"
    assert late.built == []
    assert graph_trial.outcomes == [outcome]


def test_backends_know_how_much_time_is_left() -> None:
    backend = PacedBackend()
    graph_trial = trial(2, deadline=time.perf_counter() + 100.0)
    left: list[float | None] = []

    class Looks(PacedBackend):
        def build(self, request: BuildRequest) -> Engine:
            left.append(request.seconds_left())
            return backend.build(request)

    assert graph_trial.evaluate(Looks()).succeeded
    assert left[0] is not None
    assert 0 < left[0] <= 100.0


def test_limit_of_memory_is_refused_where_memory_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aitune_core._trial.memory_in_use", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        trial(2, limits=Limits(max_memory_bytes=1))
    assert caught.value.field == "max_memory_bytes"
    assert trial(2).evaluate(PacedBackend()).memory_bytes is None


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 3 bytes"), True),
        (RuntimeError("Failed to allocate memory for requested buffer of size 4"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shape mismatch"), False),
        (None, False),
    ],
)
def test_errors_that_say_that_memory_ended_are_known(
    error: Exception | None, *, ended: bool
) -> None:
    assert is_out_of_memory(error) is ended
    if error is not None:
        outer = ValueError("failed")
        outer.__cause__ = error
        assert is_out_of_memory(outer) is ended
        error.__context__ = outer  # a circle ends, too
        assert is_out_of_memory(ValueError("other")) is False
