"""Strategies at work in `tune`, with backends that take the time that they are told."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fake_plugin import empty_registry
from fakes import FakeBackend, Fault
from paced import PacedBackend, Slow
from samples import batches, graphs_of
from torch import Tensor, nn

from aitune_core import (
    BuildError,
    CandidateRejectedError,
    FirstWinsStrategy,
    LatencyBudgetStrategy,
    MaxThroughputStrategy,
    MinLatencyStrategy,
    Module,
    OneBackendStrategy,
    PerGraphStrategy,
    TuneReport,
    TuningError,
    tune,
)


def report_of(strategy: Any, *sizes: int, **options: Any) -> tuple[Module, TuneReport]:
    model = Module(Slow().eval(), "net", strategy=strategy)
    registry = empty_registry()
    report = tune(model, [*batches(*sizes)], device="cpu", registry=registry, **options)
    return model, report


def test_lowest_latency_serves_and_the_report_says_why_the_others_lost() -> None:
    slow, fast, liar = PacedBackend(8), PacedBackend(0.5), FakeBackend(fault=Fault.ZEROS)
    model, report = report_of(MinLatencyStrategy([slow, liar, fast]), 2)
    (graph,) = report.modules[0].graphs
    assert (graph.winner, graph.strategy) == ("fake", "min_latency")
    assert graphs_of(model)[0].backend is fast
    assert [(each.status) for each in graph.candidates] == ["lost", "failed", "won"]
    lost, failed, won = graph.candidates
    assert "times as long as eager" in lost.reason
    assert "differs from eager" in failed.reason
    assert "lowest latency" in won.reason
    assert won.ratio is not None
    assert won.ratio.faster
    assert graph.eager is not None
    assert graph.eager.p50_ms >= 2.0
    assert [engine.releases for engine in slow.built] == [1]
    assert [engine.releases for engine in fast.built] == [0]


def test_most_throughput_is_found_over_the_range_of_batches() -> None:
    # Quick at one row, and slow at many.
    small, large = PacedBackend(0.0, 0.8), PacedBackend(3.0)
    model, report = report_of(MaxThroughputStrategy([small, large]), 1, 16)
    (graph,) = report.modules[0].graphs
    assert graphs_of(model)[0].backend is large
    assert "at batch size 16" in graph.reason
    assert graph.eager is not None
    assert [point.batch_size for point in graph.eager.batches][:3] == [1, 2, 4]


def test_budget_of_latency_is_kept() -> None:
    small, large = PacedBackend(0.1, 0.1), PacedBackend(30.0)
    model, report = report_of(LatencyBudgetStrategy(20.0, [large, small], percentile=50), 1, 16)
    (graph,) = report.modules[0].graphs
    assert graphs_of(model)[0].backend is small
    assert "over the latency budget" in graph.candidates[0].reason


def test_error_of_a_tuning_has_one_cause_for_each_candidate() -> None:
    strategy = FirstWinsStrategy(
        [FakeBackend(fault=Fault.BUILD), PacedBackend(9), PacedBackend(5, build_ms=60)],
        max_build_seconds=0.05,
    )
    with pytest.raises(TuningError) as caught:
        report_of(strategy, 2)
    broken, slower, late = caught.value.exceptions
    assert isinstance(broken, BuildError)
    assert isinstance(slower, CandidateRejectedError)
    assert slower.rule == "slower"
    assert isinstance(late, CandidateRejectedError)
    assert late.rule == "max_build_seconds"


def test_eager_is_kept_and_reported_where_nothing_wins_and_that_is_allowed() -> None:
    model, report = report_of(MinLatencyStrategy([PacedBackend(9)]), 2, on_failure="eager")
    (graph,) = report.modules[0].graphs
    assert graph.winner is None
    assert "no candidate is faster than eager" in graph.reason
    assert graphs_of(model) == ()
    assert torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 2.0))


def test_when_time_is_over_the_best_so_far_wins_and_the_rest_is_listed() -> None:
    first, second = PacedBackend(0.5, build_ms=1500), PacedBackend(0.1)
    start = time.perf_counter()
    model, report = report_of(MinLatencyStrategy([first, second], time_limit_s=1.0), 2)
    (graph,) = report.modules[0].graphs
    assert graphs_of(model)[0].backend is first
    assert second.built == []
    assert graph.candidates[1].status == "not tried"
    assert graph.candidates[1].reason == "time_limit_s = 1 is over"
    assert "not tried: time_limit_s = 1 is over" in report.summary()
    assert time.perf_counter() - start < 60.0


def test_candidates_after_the_first_winner_are_listed_as_not_tried() -> None:
    _, report = report_of(FirstWinsStrategy([PacedBackend(0.1), PacedBackend(0.2)]), 2)
    (graph,) = report.modules[0].graphs
    assert [each.status for each in graph.candidates] == ["won", "not tried"]
    assert graph.candidates[1].reason == "fake won before it"


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        time.sleep(0.003)
        return x * 2 if y is None else x + y


def test_graphs_have_strategies_of_their_own() -> None:
    alone, both = FakeBackend(label="alone"), FakeBackend(label="both")
    strategy = PerGraphStrategy(
        lambda graph: OneBackendStrategy(alone if len(graph.inputs) == 1 else both)
    )
    model = Module(Two().eval(), "net", strategy=strategy)
    x = torch.ones(3)
    tune(model, [((x,), {}), ((x, x), {})], device="cpu", registry=empty_registry())
    assert {len(graph.graph.inputs): graph.backend for graph in graphs_of(model)} == {
        1: alone,
        2: both,
    }
