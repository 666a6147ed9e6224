from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import AffineBackend, FakeBackend, FakeEngine, Fault
from samples import Affine, batches, mlp, recorded
from torch import nn

from aitune_core import (
    Backend,
    BuildError,
    BuildRequest,
    Engine,
    Outcome,
    RecordingError,
    ValidationError,
)
from aitune_core._trial import GraphTrial


def trial(module: Any, *inputs: Any, **hooks: Any) -> GraphTrial:
    (graph,) = recorded(module, *((x,) for x in inputs))
    hooks = {"started": lambda _: None, "finished": lambda _: None, **hooks}
    return GraphTrial("net", graph, (), torch.device("cpu"), **hooks)


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_dir() and any(path.iterdir())]


def test_good_candidate_is_built_checked_and_measured() -> None:
    backend = FakeBackend()
    outcome = trial(mlp(), *batches(2, 4)).evaluate(backend)
    assert outcome.succeeded
    assert outcome.engine is backend.built[0]
    assert outcome.error is None
    assert outcome.check is not None
    # Recorded, strided, in another order, other values, sizes.
    assert outcome.check.cases == 2 + 1 + 1 + 4 + 3
    assert outcome.measurement is not None
    assert outcome.eager is not None
    assert outcome.measurement.calls == outcome.eager.calls > 0
    assert outcome.ratio is not None
    assert outcome.speedup == outcome.ratio.value > 0
    assert outcome.seconds.build > 0
    assert outcome.seconds.check > 0
    assert outcome.seconds.measure > 0
    assert outcome.memory_bytes is not None


def test_request_holds_what_a_backend_needs(cache_dir: Path) -> None:
    backend = FakeBackend()
    graph_trial = trial(mlp(), *batches(2, 4))
    graph_trial.evaluate(backend)
    (request,) = backend.requests
    assert request.graph == graph_trial.graph
    assert [sample[0].shape[0] for sample in request.samples] == [2, 4]
    assert request.device == torch.device("cpu")
    assert request.work_dir.is_relative_to(cache_dir)
    assert request.inputs_at({"batch": 3})[0].shape == (3, 4)
    assert not request.module.training
    outputs = request.module(*request.samples[0])
    assert isinstance(outputs, tuple)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.BUILD, BuildError),
        (Fault.NO_ENGINE, BuildError),
        (Fault.OTHER_GRAPH, BuildError),
        (Fault.ZEROS, ValidationError),
        (Fault.RAISES, ValidationError),
        (Fault.COUNT, ValidationError),
    ],
)
def test_failed_candidate_is_an_outcome_and_leaves_nothing_behind(
    fault: Fault, kind: type[Exception], cache_dir: Path
) -> None:
    backend = FakeBackend(fault=fault)
    outcome = trial(mlp(), *batches(2)).evaluate(backend)
    assert not outcome.succeeded
    assert isinstance(outcome.error, kind)
    assert (outcome.check, outcome.measurement, outcome.engine) == (None, None, None)
    assert all(engine.releases == 1 for engine in backend.built)
    assert not any("net" in path.name for path in folders(cache_dir))


class ReleaseFails(FakeEngine):
    def release(self) -> None:
        msg = "cannot free"
        raise OSError(msg)


class ReleaseFailsBackend(FakeBackend):
    def build(self, request: BuildRequest) -> Engine:
        return ReleaseFails(request, self.name, Fault.ZEROS)


def test_failed_candidate_whose_memory_cannot_be_freed_costs_only_itself() -> None:
    outcome = trial(mlp(), *batches(2)).evaluate(ReleaseFailsBackend())
    assert isinstance(outcome.error, ValidationError)


class Interrupted(FakeBackend):
    def build(self, request: BuildRequest) -> Engine:
        raise KeyboardInterrupt


def test_interrupt_is_no_failure_of_a_candidate(cache_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trial(mlp(), *batches(2)).evaluate(Interrupted())
    assert not any("net" in path.name for path in cache_dir.rglob("*"))


class ChecksItself(FakeBackend):
    """Tries a wrong way of building first, as real backends do."""

    def build(self, request: BuildRequest) -> Engine:
        wrong = FakeEngine(request, self.name, Fault.ZEROS)
        with pytest.raises(ValidationError):
            request.check(wrong)
        right = FakeEngine(request, self.name, Fault.NONE)
        assert request.check(right) is not None
        right.runs = 0
        return right


def test_engine_that_the_backend_has_checked_is_not_checked_twice() -> None:
    graph_trial = trial(mlp(), *batches(2))
    outcome = graph_trial.build(ChecksItself())
    assert outcome.check is not None
    assert isinstance(outcome.engine, FakeEngine)
    plain = graph_trial.build(FakeBackend())
    assert isinstance(plain.engine, FakeEngine)
    # Three more runs look at whose the results are.
    assert outcome.engine.runs == plain.engine.runs - outcome.check.cases - 3


def test_hooks_see_start_and_end_of_each_candidate() -> None:
    log: list[Any] = []
    backends = [FakeBackend(), FakeBackend(fault=Fault.ZEROS)]
    graph_trial = trial(mlp(), *batches(2), started=log.append, finished=log.append)
    outcomes = [graph_trial.evaluate(backend) for backend in backends]
    assert log == [backends[0], outcomes[0], backends[1], outcomes[1]]
    assert graph_trial.outcomes == outcomes


def test_liar_does_not_spoil_the_next_candidate() -> None:
    graph_trial = trial(mlp(), *batches(2, 3))
    faults = [Fault.WRITES, Fault.STALE, Fault.RAISES, Fault.COUNT]
    failed = [graph_trial.evaluate(FakeBackend(fault=fault)) for fault in faults]
    assert [outcome.succeeded for outcome in failed] == [False] * 4
    assert graph_trial.evaluate(FakeBackend()).error is None


def test_work_folder_lives_as_long_as_the_engine(cache_dir: Path) -> None:
    def evaluated() -> Outcome:
        return trial(Affine(), *batches(2)).evaluate(AffineBackend())

    outcome = evaluated()
    files = list(cache_dir.rglob("values.bin"))
    assert len(files) == 1
    del outcome
    gc.collect()
    assert not files[0].exists()
    assert not files[0].parent.exists()


def test_changes_of_inputs_are_measured_on_copies() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()

    graph_trial = trial(forward, torch.ones(3))
    assert graph_trial.evaluate(FakeBackend()).error is None
    assert graph_trial._recorded.samples[0][0].tolist() == [1.0, 1.0, 1.0]


def test_preparing_refuses_eager_that_is_not_repeatable() -> None:
    with pytest.raises(RecordingError):
        trial(lambda x: x + torch.rand(3), torch.ones(3)).prepare()


def test_candidates_run_without_grad() -> None:
    seen: list[bool] = []

    class Watching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_grad_enabled())
            return x * 2

    graph_trial = trial(Watching(), torch.ones(3))
    graph_trial.prepare()
    seen.clear()
    backend: Backend = FakeBackend()
    assert graph_trial.evaluate(backend).succeeded
    assert set(seen) == {False}
