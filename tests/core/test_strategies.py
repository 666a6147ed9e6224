from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fakes import AffineEngine, FakeBackend
from samples import batches, mlp, recorded

from aitune_core import (
    Backend,
    BuildError,
    ConfigError,
    Decision,
    FirstWinsStrategy,
    Measurement,
    OneBackendStrategy,
    Outcome,
    Strategy,
    Trial,
)
from aitune_core.strategy import BackendSource

(GRAPH,) = recorded(mlp(), *((x,) for x in batches(2)))
A, B, C = (FakeBackend(label=label) for label in "abc")


def latency(ms: float) -> Measurement:
    return Measurement(p50_ms=ms, p90_ms=ms, p99_ms=ms, calls=1)


def outcome(backend: Backend, speedup: float | None) -> Outcome:
    if speedup is None:
        return Outcome(backend=backend, error=BuildError("broken", backend_name=backend.name))
    engine = AffineEngine(GRAPH.spec, torch.device("cpu"), [])
    return Outcome(backend=backend, engine=engine, measurement=latency(1.0), eager=latency(speedup))


class ScriptedTrial(Trial):
    def __init__(self, speedups: Mapping[FakeBackend, float | None]) -> None:
        self.graph = GRAPH.spec
        self.backends = tuple(speedups)
        self.outcomes = {backend: outcome(backend, value) for backend, value in speedups.items()}
        self.evaluated: list[Backend] = []

    def evaluate(self, backend: Backend) -> Outcome:
        assert isinstance(backend, FakeBackend)
        self.evaluated.append(backend)
        return self.outcomes[backend]


def decided(strategy: Strategy, trial: ScriptedTrial) -> FakeBackend | None:
    decision = strategy.decide(trial)
    assert isinstance(decision, Decision)
    assert decision.reason
    winner = None if decision.winner is None else decision.winner.backend
    assert winner is None or isinstance(winner, FakeBackend)
    return winner


def test_speedup_is_the_ratio_of_medians() -> None:
    assert outcome(A, 2.5).speedup == 2.5
    assert outcome(A, 2.5).succeeded
    assert outcome(A, None).speedup is None
    assert not outcome(A, None).succeeded


def test_one_backend_wins_when_it_is_right_even_if_slower() -> None:
    assert decided(OneBackendStrategy(A), ScriptedTrial({A: 0.1})) is A


def test_one_backend_that_fails_keeps_eager_and_says_why() -> None:
    decision = OneBackendStrategy(A).decide(ScriptedTrial({A: None}))
    assert decision.winner is None
    assert "fake" in decision.reason
    assert "broken" in decision.reason


def test_first_candidate_that_is_right_and_fast_wins_and_later_ones_are_not_built() -> None:
    trial = ScriptedTrial({A: None, B: 1.0, C: 9.0})
    assert decided(FirstWinsStrategy([A, B, C]), trial) is B
    assert trial.evaluated == [A, B]


def test_slower_candidates_lose_to_eager() -> None:
    trial = ScriptedTrial({A: 0.99, B: None})
    assert decided(FirstWinsStrategy([A, B]), trial) is None
    assert trial.evaluated == [A, B]


def test_slower_candidates_may_be_allowed() -> None:
    trial = ScriptedTrial({A: 0.5, B: 2.0})
    assert decided(FirstWinsStrategy([A, B], allow_slower=True), trial) is A


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
