from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from fakes import AffineEngine, FakeBackend
from samples import batches, mlp, recorded

from aitune_core import (
    Backend,
    BatchPoint,
    BuildError,
    ConfigError,
    Decision,
    FirstWinsStrategy,
    LatencyBudgetStrategy,
    Limits,
    MaxThroughputStrategy,
    Measurement,
    MinLatencyStrategy,
    OneBackendStrategy,
    Outcome,
    PerGraphStrategy,
    Ratio,
    Strategy,
    Trial,
)
from aitune_core.strategy import BackendSource

(GRAPH,) = recorded(mlp(), *((x,) for x in batches(2)))
A, B, C = (FakeBackend(label=label) for label in "abc")


@attrs.frozen
class Script:
    """What becomes of a candidate: ms per call by batch size, or a failure.

    Attributes:
        ms: Latency on recorded calls; None fails to build.
        at: Latency by batch size; sizes that are missing end memory.
    """

    ms: float | None = 1.0
    at: Mapping[int, float] = attrs.field(factory=dict)


def latency(ms: float, size: int | None = None, points: tuple[BatchPoint, ...] = ()) -> Measurement:
    rate = (size or 1) / ms * 1e3
    return Measurement(
        p50_ms=ms,
        p90_ms=ms,
        p99_ms=ms,
        calls=1,
        samples_per_second=rate,
        batch_size=size,
        batches=points,
    )


def outcome(backend: Backend, ms: float | None) -> Outcome:
    if ms is None:
        return Outcome(backend=backend, error=BuildError("broken", backend_name=backend.name))
    engine = AffineEngine(GRAPH.spec, torch.device("cpu"), [])
    return Outcome(backend=backend, engine=engine)


class ScriptedTrial(Trial):
    """Gives latencies from a script, sure to one percent; eager takes 1 ms."""

    def __init__(
        self,
        scripts: Mapping[FakeBackend, Script | float | None],
        eager: Script | float = 1.0,
        again: Mapping[int, float] | None = None,
    ) -> None:
        self.graph = GRAPH.spec
        self.backends = tuple(scripts)
        self.scripts = {
            backend: script if isinstance(script, Script) else Script(script)
            for backend, script in scripts.items()
        }
        self.built: list[Backend] = []
        self.skipped: dict[Backend, str] = {}
        self.sizes: list[Any] = []
        self._eager_script = eager if isinstance(eager, Script) else Script(eager)
        self._eager: Measurement | None = None
        self._times: dict[Any, float] = {}
        #: Latencies at batch sizes when they are timed for the second time.
        self._again = again or {}

    @property
    def eager(self) -> Measurement | None:
        return self._eager

    def build(self, backend: Backend) -> Outcome:
        assert isinstance(backend, FakeBackend)
        self.built.append(backend)
        return outcome(backend, self.scripts[backend].ms)

    def measure(
        self,
        outcomes: Sequence[Outcome],
        batch_sizes: Sequence[int | None] | None = None,
        *,
        burst: bool = False,
    ) -> tuple[Outcome, ...]:
        sizes = batch_sizes or [None] * (len(outcomes) + 1)
        self.sizes.append(batch_sizes)
        timed = []
        self._eager = self._timed(None, self._eager_script, sizes[0], self._eager)
        for each, size in zip(outcomes, sizes[1:], strict=True):
            assert isinstance(each.backend, FakeBackend)
            script = self.scripts[each.backend]
            measurement = self._timed(each.backend, script, size, each.measurement)
            timed.append(attrs.evolve(each, measurement=measurement))
        return tuple(attrs.evolve(each, ratio=self.compare(each)) for each in timed)

    def _timed(
        self, key: Any, script: Script, size: int | None, before: Measurement | None
    ) -> Measurement:
        assert script.ms is not None
        ms = script.ms if size is None else self._again.get(size, script.at[size])
        self._times[key] = ms / (size or 1)
        return latency(ms, size, () if before is None else before.batches)

    def sweep(self, outcomes: Sequence[Outcome], *, burst: bool = False) -> tuple[Outcome, ...]:
        self._eager = self._swept(self._eager_script)
        swept = []
        for each in outcomes:
            assert isinstance(each.backend, FakeBackend)
            swept.append(attrs.evolve(each, measurement=self._swept(self.scripts[each.backend])))
        return tuple(swept)

    @staticmethod
    def _swept(script: Script) -> Measurement | None:
        points = [
            BatchPoint(
                batch_size=size,
                p50_ms=ms,
                p90_ms=ms,
                p99_ms=ms,
                samples_per_second=size / ms * 1e3,
            )
            for size, ms in script.at.items()
        ]
        if not points:
            return None
        full = BatchPoint(batch_size=1024, error="out of memory")
        return latency(1.0, None, (*points, full))

    def compare(self, first: Outcome, second: Outcome | None = None) -> Ratio:
        other = None if second is None else second.backend
        value = self._times[other] / self._times[first.backend]
        return Ratio(value=value, low=value * 0.99, high=value * 1.01, confidence=0.99, rounds=12)

    def skip(self, backend: Backend, reason: str) -> Outcome:
        self.skipped[backend] = reason
        return Outcome(backend=backend, not_tried=reason)


def decided(strategy: Strategy, trial: ScriptedTrial) -> FakeBackend | None:
    decision = strategy.decide(trial)
    assert isinstance(decision, Decision)
    assert decision.reason
    winner = None if decision.winner is None else decision.winner.backend
    assert winner is None or isinstance(winner, FakeBackend)
    return winner


def test_speedup_is_the_ratio_or_that_of_medians() -> None:
    timed = attrs.evolve(outcome(A, 2.5), measurement=latency(2.0), eager=latency(5.0))
    assert timed.speedup == 2.5
    ratio = Ratio(value=2.4, low=2.3, high=2.5, confidence=0.99, rounds=12)
    assert attrs.evolve(timed, ratio=ratio).speedup == 2.4
    assert outcome(A, None).speedup is None
    assert (outcome(A, 1.0).succeeded, outcome(A, None).succeeded) == (True, False)


def test_one_backend_wins_when_it_is_right_even_if_slower() -> None:
    decision = OneBackendStrategy(A).decide(ScriptedTrial({A: 10.0}))
    assert decision.winner is not None
    assert "takes 10.00 times as long as eager (99 % interval 9.90 to 10.10)" in decision.reason


def test_one_backend_that_fails_keeps_eager_and_says_why() -> None:
    decision = OneBackendStrategy(A).decide(ScriptedTrial({A: None}))
    assert decision.winner is None
    assert "fake" in decision.reason
    assert "broken" in decision.reason


def test_first_candidate_that_is_right_and_fast_wins_and_later_ones_are_not_built() -> None:
    trial = ScriptedTrial({A: None, B: 0.9, C: 0.1})
    assert decided(FirstWinsStrategy([A, B, C]), trial) is B
    assert trial.built == [A, B]
    assert trial.skipped == {C: "fake won before it"}


@pytest.mark.parametrize("ms", [1.0, 0.995, 1.2])
def test_candidates_that_are_not_faster_for_sure_lose_to_eager(ms: float) -> None:
    trial = ScriptedTrial({A: ms, B: None})
    assert decided(FirstWinsStrategy([A, B]), trial) is None
    assert trial.built == [A, B]


def test_slower_candidates_may_be_allowed() -> None:
    trial = ScriptedTrial({A: 2.0, B: 0.5})
    assert decided(FirstWinsStrategy([A, B], allow_slower=True), trial) is A


def test_lowest_latency_wins_of_all_that_are_built() -> None:
    trial = ScriptedTrial({A: 0.5, B: 0.2, C: 0.8})
    decision = MinLatencyStrategy([A, B, C]).decide(trial)
    assert decision.winner is not None
    assert decision.winner.backend is B
    assert trial.built == [A, B, C]
    assert "5.00 times as fast as eager" in decision.reason
    assert "takes 2.50 times as long as fake" in decision.lost[A]
    assert "takes 4.00 times as long as fake" in decision.lost[C]


def test_without_a_sure_difference_the_earlier_candidate_stays() -> None:
    trial = ScriptedTrial({A: 0.5, B: 0.497})
    decision = MinLatencyStrategy([A, B]).decide(trial)
    assert decision.winner is not None
    assert decision.winner.backend is A
    assert "no sure difference from fake" in decision.lost[B]


@pytest.mark.parametrize("strategy", [MinLatencyStrategy, MaxThroughputStrategy])
def test_what_is_slower_than_eager_wins_only_where_it_may(strategy: Any) -> None:
    slow: dict[FakeBackend, Script | float | None] = {A: 3.0, B: 2.0, C: None}
    decision = strategy([A, B, C]).decide(ScriptedTrial(slow))
    assert decision.winner is None
    assert "takes 3.00 times as long as eager" in decision.lost[A]
    assert "fake failed" in decision.reason
    assert decided(strategy([A, B, C], allow_slower=True), ScriptedTrial(slow)) is B


def test_throughput_is_compared_at_the_best_batch_size_of_each() -> None:
    eager = Script(1.0, {1: 1.0, 8: 4.0, 16: 9.0})
    trial = ScriptedTrial(
        {
            A: Script(0.1, {1: 0.1, 8: 3.0, 16: 8.0}),
            B: Script(2.0, {1: 2.0, 8: 2.5, 16: 3.0, 32: 6.5}),
        },
        eager,
    )
    decision = MaxThroughputStrategy([A, B]).decide(trial)
    assert trial.sizes == [[8, 1, 16]]
    assert decision.winner is not None
    assert decision.winner.backend is A  # 10 rows per ms at batch size 1; B has 5.3 at 16
    assert "at batch size 1" in decision.reason
    assert A not in decision.lost
    assert "takes 1.88 times as long as fake" in decision.lost[B]


def test_throughput_without_a_batch_dim_is_that_of_recorded_calls() -> None:
    trial = ScriptedTrial({A: 0.5})
    assert decided(MaxThroughputStrategy([A]), trial) is A
    assert trial.sizes == [None]


def test_budget_leaves_the_batch_sizes_that_are_within_it() -> None:
    eager = Script(1.0, {1: 2.0, 8: 8.0, 16: 14.0})
    fast = Script(1.0, {1: 1.0, 8: 4.0, 16: 6.0, 32: 11.0})
    trial = ScriptedTrial({A: fast}, eager)
    decision = LatencyBudgetStrategy(10.0, [A]).decide(trial)
    assert trial.sizes == [[8, 16]]
    assert decision.winner is not None
    assert "p99 within 10 ms, at batch size 16; 2.67 times as fast as eager" in decision.reason


def test_candidate_over_the_budget_the_second_time_tries_a_smaller_size() -> None:
    fast = Script(1.0, {1: 1.0, 8: 4.0, 16: 6.0})
    trial = ScriptedTrial({A: fast}, Script(1.0, {1: 5.0, 8: 50.0}), again={16: 12.0})
    decision = LatencyBudgetStrategy(10.0, [A]).decide(trial)
    assert trial.sizes == [[1, 16], [1, 8]]
    assert decision.winner is not None
    assert "at batch size 8" in decision.reason


def test_candidate_within_the_budget_wins_where_eager_is_over_it() -> None:
    trial = ScriptedTrial({A: Script(1.0, {1: 9.0})}, Script(1.0, {1: 12.0, 64: 13.0}))
    decision = LatencyBudgetStrategy(10.0, [A]).decide(trial)
    assert decision.winner is not None
    assert "eager is over the budget" in decision.reason


def test_budget_that_nothing_meets_says_how_close_each_came() -> None:
    trial = ScriptedTrial({A: Script(1.0, {1: 30.0, 2: 31.0}), B: None}, Script(1.0, {1: 50.0}))
    decision = LatencyBudgetStrategy(10.0, [A, B], percentile=90).decide(trial)
    assert decision.winner is None
    assert "no candidate has its p90 within 10 ms" in decision.reason
    assert "its least p90 is 30 ms, 10 ms are allowed" in decision.lost[A]


def test_budget_without_a_batch_dim_is_for_recorded_calls() -> None:
    decision = LatencyBudgetStrategy(0.4, [A, B]).decide(ScriptedTrial({A: 0.5, B: 0.3}))
    assert decision.winner is not None
    assert decision.winner.backend is B
    assert "its least p99 is 0.5 ms" in decision.lost[A]


@pytest.mark.parametrize("budget", [0, -1.0, math.inf, math.nan, "10", None, True])
def test_budgets_that_mean_nothing_are_refused(budget: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LatencyBudgetStrategy(budget)
    assert caught.value.field == "latency_budget_ms"


@pytest.mark.parametrize("percentile", [0, 95, 100, "p99", None, True])
def test_percentiles_that_are_not_measured_are_refused(percentile: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LatencyBudgetStrategy(10.0, percentile=percentile)
    assert caught.value.field == "percentile"


LIMITS = ("max_memory_bytes", "max_error", "max_build_seconds", "time_limit_s")


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "1", True])
def test_limits_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        MinLatencyStrategy([A], **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    "make",
    [
        lambda **limits: OneBackendStrategy(A, **limits),
        lambda **limits: FirstWinsStrategy([A], **limits),
        lambda **limits: MinLatencyStrategy([A], **limits),
        lambda **limits: MaxThroughputStrategy([A], **limits),
        lambda **limits: LatencyBudgetStrategy(1.0, [A], **limits),
    ],
)
def test_every_strategy_takes_every_limit_and_no_other_option(make: Any) -> None:
    given = dict.fromkeys(LIMITS, 3)
    assert make(**given).limits == Limits(**given)
    assert make().limits == Limits()
    with pytest.raises(ConfigError, match="has no option 'budget'") as caught:
        make(budget=1)
    assert caught.value.field == "budget"


def test_strategy_for_a_graph_is_chosen_by_the_graph() -> None:
    one, other = OneBackendStrategy(A), MinLatencyStrategy([B])
    strategy = PerGraphStrategy(lambda graph: one if graph.name == GRAPH.spec.name else other)
    assert strategy.for_graph(GRAPH.spec) is one
    assert strategy.for_graph(attrs.evolve(GRAPH.spec, name="other")) is other
    assert decided(strategy, ScriptedTrial({A: 3.0})) is A


@pytest.mark.parametrize("choose", [None, "first_wins", FirstWinsStrategy, {}])
def test_per_graph_needs_a_function(choose: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PerGraphStrategy(choose)
    assert caught.value.field == "choose"


def test_entries_of_configuration_files_are_candidates() -> None:
    entries: list[BackendSource] = [
        {"backend": "fake", "options": {"label": "x"}},
        {"backend": "fake"},
    ]
    assert FirstWinsStrategy(entries).backends == (("fake", {"label": "x"}), ("fake", {}))


@pytest.mark.parametrize(
    "entry", [{}, {"options": {}}, {"backend": 3}, {"backend": "a", "options": 1}]
)
def test_entries_without_a_name_or_with_other_options_are_refused(entry: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        FirstWinsStrategy([entry])
    assert caught.value.field == "backends"


def test_unknown_keys_of_an_entry_are_named() -> None:
    with pytest.raises(ConfigError, match="got also provider"):
        FirstWinsStrategy([{"backend": "fake", "provider": "cuda"}])


@pytest.mark.parametrize(
    "backends",
    [
        "onnxruntime",
        A,
        [],
        [FakeBackend],
        [None],
        [("fake",)],
        [("fake", {}, 1)],
        [(1, {})],
        [3],
        0,
    ],
)
def test_candidates_of_other_types_are_refused(backends: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        FirstWinsStrategy(backends)
    assert caught.value.field == "backends"


@pytest.mark.parametrize("backend", [None, FakeBackend, ("fake",), 3])
def test_one_backend_refuses_what_is_no_candidate(backend: Any) -> None:
    with pytest.raises(ConfigError):
        OneBackendStrategy(backend)


def test_allow_slower_is_a_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        FirstWinsStrategy([A], allow_slower="yes")  # type: ignore[arg-type]
    assert caught.value.field == "allow_slower"


def test_candidates_may_be_names_pairs_and_objects() -> None:
    sources: list[BackendSource] = ["fake", ("fake", {"label": "x"}), A]
    assert FirstWinsStrategy(sources).backends == tuple(sources)
    assert FirstWinsStrategy().backends is None
    assert "fake" in repr(FirstWinsStrategy(sources))
    assert (OneBackendStrategy.name, FirstWinsStrategy.name) == ("one_backend", "first_wins")
