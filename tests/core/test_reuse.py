from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from fake_plugin import empty_registry
from fakes import AffineBackend, FakeBackend, Fault
from samples import Affine, graphs_of
from stored_builds import DAMAGES, kill, stored_keys
from torch import Tensor, nn

from aitune_core import (
    ArtifactReader,
    Attempt,
    BackendUnavailableError,
    BuildRequest,
    ConfigError,
    Decision,
    Engine,
    GraphSpec,
    Module,
    OneBackendStrategy,
    Outcome,
    SizeCondition,
    Strategy,
    Trial,
    TuneReport,
    TuningError,
    tune,
)
from aitune_core._builds import BuildStore
from aitune_core._report import CandidateReport
from aitune_core._timing import Timing

X = torch.arange(8.0).reshape(2, 4)


class Counted(AffineBackend):
    """Counts what it builds and loads; may limit sizes and precision."""

    conditions: ClassVar[tuple[SizeCondition, ...]] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.built = 0
        self.loaded = 0

    def build(self, request: BuildRequest) -> Engine:
        self.built += 1
        request.record_attempt(Attempt("the long way", succeeded=False, detail="too long"))
        request.record_attempt(Attempt("the short way", succeeded=True))
        engine = super().build(request)
        engine.limit_sizes(self.conditions)
        return engine

    def load(self, artifacts: ArtifactReader, graph: GraphSpec, device: torch.device) -> Engine:
        self.loaded += 1
        return super().load(artifacts, graph, device)


def tuned_with(
    backend: Any, module: nn.Module | None = None, data: Any = X, **options: Any
) -> tuple[Module, TuneReport]:
    model = Module(
        (Affine() if module is None else module).eval(),
        "net",
        strategy=OneBackendStrategy(backend),
    )
    options.setdefault("registry", empty_registry())
    return model, tune(model, data, device="cpu", **options)


def candidate(report: TuneReport) -> CandidateReport:
    (module,) = report.modules
    (graph,) = module.graphs
    (found,) = graph.candidates
    return found


def steps(report: TuneReport) -> list[tuple[str, bool]]:
    return [(attempt.step, attempt.succeeded) for attempt in candidate(report).attempts]


def test_second_tuning_of_the_same_restores_the_engine() -> None:
    first, second = Counted(), Counted()
    _, report = tuned_with(first)
    assert (first.built, first.loaded) == (1, 0)
    assert not candidate(report).reused
    assert candidate(report).seconds.load is None
    assert steps(report) == [("the long way", False), ("the short way", True)]
    model, report = tuned_with(second)
    assert (second.built, second.loaded) == (0, 1)
    found = candidate(report)
    assert found.reused
    assert found.check is not None
    assert found.measurement is not None
    assert found.seconds.build == 0.0
    assert found.seconds.load is not None
    assert found.seconds.load > 0
    assert steps(report) == [("find an earlier build", True)]
    assert "the short way" in found.attempts[0].detail
    assert model(X).tolist() == (2 * X + 3).tolist()


def test_other_values_are_another_build(cache_dir: Path) -> None:
    backend = Counted()
    for module, data in ((Affine(), X), (Affine(2.5), X), (Affine(), X + 1)):
        tuned_with(backend, module, data)
    assert (backend.built, backend.loaded) == (3, 0)
    assert len(stored_keys(cache_dir)) == 3


def test_caller_may_build_anew_and_keep_nothing(cache_dir: Path) -> None:
    backend = Counted()
    for _ in range(2):
        tuned_with(backend, reuse_builds=False)
    assert (backend.built, backend.loaded) == (2, 0)
    assert not (cache_dir / "builds").exists()
    tuned_with(backend)
    tuned_with(backend, reuse_builds=False)
    assert (backend.built, backend.loaded) == (4, 0)


def test_no_room_for_builds_keeps_nothing_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    monkeypatch.setenv("AITUNE_CACHE_MAX_BYTES", "0")
    _, report = tuned_with(Counted())
    assert ("keep the build", False) not in steps(report)
    assert not (cache_dir / "builds").exists()


def test_bad_setting_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITUNE_CACHE_MAX_BYTES", "much")
    backend = Counted()
    with pytest.raises(ConfigError):
        tuned_with(backend)
    assert backend.built == 0


def test_engine_that_cannot_be_stored_is_built_anew_without_a_word(cache_dir: Path) -> None:
    backend = FakeBackend()
    for _ in range(2):
        _, report = tuned_with(backend)
        assert candidate(report).attempts == ()
    assert len(backend.built) == 2
    assert list((cache_dir / "builds").iterdir()) == []


def test_limits_on_sizes_come_back() -> None:
    class Limited(Counted):
        conditions = (SizeCondition("batch < 4"),)

    backend = Limited()
    for _ in range(2):
        model, report = tuned_with(backend, Affine(), [X, X.new_ones(3, 4)])
        (graph,) = graphs_of(model)
        assert graph.engine.graph.conditions == Limited.conditions
        assert report.modules[0].graphs[0].conditions
    assert (backend.built, backend.loaded) == (1, 1)


class Half(Counted):
    """Computes in half precision; ``remembers`` says whether restored engines know."""

    remembers: ClassVar[bool] = True

    def build(self, request: BuildRequest) -> Engine:
        engine = super().build(request)
        engine.compute_dtype = torch.float16
        return engine

    def load(self, artifacts: ArtifactReader, graph: GraphSpec, device: torch.device) -> Engine:
        engine = super().load(artifacts, graph, device)
        if self.remembers:
            engine.compute_dtype = torch.float16
        return engine


def test_restored_engine_must_compute_in_the_same_type() -> None:
    class Forgetful(Half):
        remembers = False

    backend = Half()
    for _ in range(2):
        model, _ = tuned_with(backend)
        assert graphs_of(model)[0].engine.compute_dtype is torch.float16
    assert (backend.built, backend.loaded) == (1, 1)
    backend = Forgetful()
    tuned_with(backend)
    model, report = tuned_with(backend)
    assert (backend.built, backend.loaded) == (2, 1)
    assert steps(report)[0] == ("find an earlier build", False)
    assert graphs_of(model)[0].engine.compute_dtype is torch.float16


def values_file(entry: Path) -> None:
    file = entry / "files" / "weights" / "values.bin"
    file.chmod(0o644)
    file.write_bytes(bytes(len(file.read_bytes())))


@pytest.mark.parametrize("damage", [*DAMAGES[5:9], values_file])
def test_damaged_build_is_built_anew_and_the_report_says_so(
    damage: Callable[[Path], None], cache_dir: Path
) -> None:
    backend = Counted()
    tuned_with(backend)
    (number,) = stored_keys(cache_dir)
    damage(cache_dir / "builds" / f"{number:064x}")
    model, report = tuned_with(backend)
    assert (backend.built, backend.loaded) == (2, 0)
    assert steps(report) == [
        ("find an earlier build", False),
        ("the long way", False),
        ("the short way", True),
    ]
    assert model(X).tolist() == (2 * X + 3).tolist()
    _, report = tuned_with(backend)
    assert candidate(report).reused


def test_wrong_engine_under_the_right_name_never_serves(cache_dir: Path) -> None:
    backend = Counted()
    tuned_with(backend, Affine(2.0))
    (right,) = stored_keys(cache_dir)
    tuned_with(backend, Affine(5.0))
    (wrong,) = set(stored_keys(cache_dir)) - {right}
    builds = cache_dir / "builds"
    (builds / f"{right:064x}").rename(builds / "aside")
    (builds / f"{wrong:064x}").rename(builds / f"{right:064x}")
    model, report = tuned_with(backend, Affine(2.0))
    assert (backend.built, backend.loaded) == (3, 1)
    assert steps(report)[0] == ("find an earlier build", False)
    assert model(X).tolist() == (2 * X + 3).tolist()
    _, report = tuned_with(backend, Affine(2.0))
    assert candidate(report).reused


def test_restored_engine_that_cannot_be_measured_is_built_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Counted()
    tuned_with(backend)
    measure, calls = Timing.measure, []

    def failing(timing: Timing, outcomes: Sequence[Outcome], *args: Any, **kwargs: Any) -> Any:
        calls.append(outcomes)
        if len(calls) > 1:
            return measure(timing, outcomes, *args, **kwargs)
        error = RuntimeError("the runtime broke")
        return [attrs.evolve(outcome, engine=None, error=error) for outcome in outcomes]

    monkeypatch.setattr(Timing, "measure", failing)
    _, report = tuned_with(backend)
    assert (backend.built, backend.loaded) == (2, 1)
    assert not candidate(report).reused
    assert steps(report)[0] == ("find an earlier build", False)
    assert "the runtime broke" in candidate(report).attempts[0].detail


def test_module_whose_content_cannot_be_told_is_built_anew_and_the_report_says_so() -> None:
    backend = Counted()
    for _ in range(2):
        module = Affine()
        module.sparse = torch.eye(2).to_sparse()
        _, report = tuned_with(backend, module)
        assert steps(report)[0] == ("find an earlier build", False)
        assert "sparse" in candidate(report).attempts[0].detail
    assert (backend.built, backend.loaded) == (2, 0)


def test_failed_candidate_leaves_no_build(cache_dir: Path) -> None:
    backend = FakeBackend(fault=Fault.ZEROS)
    with pytest.raises(TuningError):
        tuned_with(backend)
    assert backend.built[0].closed
    assert list((cache_dir / "builds").iterdir()) == []


def test_backend_that_is_not_available_keeps_its_builds(cache_dir: Path) -> None:
    class Gone(Counted):
        gone: ClassVar[bool] = False

        def load(self, artifacts: ArtifactReader, graph: GraphSpec, device: torch.device) -> Engine:
            if self.gone:
                msg = "its driver is gone"
                raise BackendUnavailableError(msg, backend_name=self.name, missing="driver")
            return super().load(artifacts, graph, device)

    backend = Gone()
    tuned_with(backend)
    backend.gone = True  # type: ignore[misc]
    with pytest.raises(TuningError):
        tuned_with(backend)
    assert len(stored_keys(cache_dir)) == 1


def test_tuning_goes_on_where_nothing_can_be_kept(cache_dir: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / "builds").write_text("a file in the place of the folder")
    backend = Counted()
    model, report = tuned_with(backend)
    assert steps(report)[0] == ("find an earlier build", False)
    assert model(X).tolist() == (2 * X + 3).tolist()


def test_tuning_goes_on_where_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    _, report = tuned_with(Counted())
    found = candidate(report)
    assert found.attempts[-1].step == "keep the build"
    assert "No space left" in found.attempts[-1].detail
    assert list((cache_dir / "builds").iterdir()) == []


class Interrupting(Counted):
    """Is interrupted in its second build."""

    def build(self, request: BuildRequest) -> Engine:
        if self.built == 1:
            raise KeyboardInterrupt
        return super().build(request)


def two_ranks() -> list[Tensor]:
    return [X, X[None]]


def test_interrupted_tuning_resumes_from_finished_builds() -> None:
    with pytest.raises(KeyboardInterrupt):
        tuned_with(Interrupting(), data=two_ranks())
    backend = Interrupting()
    _, report = tuned_with(backend, data=two_ranks())
    reused = [graph.candidates[0].reused for graph in report.modules[0].graphs]
    assert reused == [True, False]
    assert (backend.built, backend.loaded) == (1, 1)


class Both(Strategy):
    name = "both"

    def decide(self, trial: Trial) -> Decision:
        outcomes = [trial.evaluate(backend) for backend in trial.backends]
        return Decision(outcomes[-1], "the last one")


def test_candidates_with_other_options_have_builds_of_their_own(cache_dir: Path) -> None:
    config = AffineBackend.config_class
    backends = [Counted(config(label=label)) for label in "ab"]  # type: ignore[call-arg]
    for _ in range(2):
        model = Module(Affine().eval(), "net", strategy=Both(backends))
        tune(model, X, device="cpu", registry=empty_registry())
    assert [(backend.built, backend.loaded) for backend in backends] == [(1, 1)] * 2
    assert len(stored_keys(cache_dir)) == 2


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import test_reuse as t
from aitune_core import _measurement, _stopwatch
_measurement._BUDGET_SECONDS = _stopwatch._PAUSE_SECONDS = 0.0

class Slow(t.Counted):
    def build(self, request):
        print("building", flush=True)
        time.sleep(float(sys.argv[2]))
        return super().build(request)

print("ready", flush=True)
sys.stdin.readline()
_, report = t.tuned_with(Slow())
print("reused" if t.candidate(report).reused else "built", flush=True)
"""


Start = Callable[[float], "subprocess.Popen[str]"]


@pytest.fixture
def process() -> Iterator[Start]:
    started = []

    def start(seconds: float) -> subprocess.Popen[str]:
        found = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(found)
        return found

    yield start
    for each in started:
        each.kill()
        each.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_at_once_build_once(process: Start) -> None:
    both = [process(1.0), process(1.0)]
    assert [line(each) for each in both] == ["ready"] * 2
    for each in both:
        go(each)
    said = sorted(sorted(each.communicate()[0].split()) for each in both)
    assert said == [["building", "built"], ["reused"]]


def test_build_of_a_killed_process_is_done_by_the_next(process: Start) -> None:
    first, second = process(60.0), process(0.0)
    assert line(first) == line(second) == "ready"
    go(first)
    assert line(first) == "building"
    go(second)
    time.sleep(0.3)
    assert second.poll() is None
    kill(first)
    assert second.communicate()[0].split() == ["building", "built"]


def test_wait_for_another_build_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitune_core._reuse._MAX_WAIT_SECONDS", 0.1)
    reports: list[Any] = []

    class Nested(Counted):
        def build(self, request: BuildRequest) -> Engine:
            engine = super().build(request)
            if not reports:
                reports.append(None)
                reports.append(tuned_with(self)[1])
            return engine

    backend = Nested()
    tuned_with(backend)
    assert backend.built == 2
    assert steps(reports[1])[0] == ("find an earlier build", False)
    assert "another process" in candidate(reports[1]).attempts[0].detail


def test_lock_is_free_after_an_interrupt(cache_dir: Path) -> None:
    class Interrupted(Counted):
        def build(self, request: BuildRequest) -> Engine:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned_with(Interrupted())
    assert list((cache_dir / "builds").iterdir()) == []
    assert BuildStore().is_open
