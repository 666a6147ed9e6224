"""Sessions that do not survive their first creation or run cost their candidate alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import aitune_core as ait
from aitune_backend_onnxruntime import session
from aitune_backend_onnxruntime.dtypes import ONNX_TYPES
from aitune_backend_onnxruntime.errors import SessionTrialError
from aitune_backend_onnxruntime.model_file import ModelFacts, facts_of
from aitune_backend_onnxruntime.session import SessionSetup, session_setup
from aitune_backend_onnxruntime.session_trial import SessionTrial, trial_of
from aitune_core.backend import Attempt
from aitune_core.errors import BuildError

MakeCase = Callable[..., Any]
STEP = "session in a child process"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="about signals and limits of Linux")


@attrs.frozen
class Made:
    """A model on disk with a trial of it, and the attempts that the trial noted."""

    setup: SessionSetup
    facts: ModelFacts
    trial: SessionTrial
    attempts: list[Attempt]

    def run(self, **changes: Any) -> onnx.ModelProto | None:
        return attrs.evolve(self.trial, **changes).run(self.setup, self.facts)


def saved(graph: onnx.GraphProto, folder: Path, inputs: Mapping[str, Tensor]) -> Made:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    path = folder / "model.onnx"
    onnx.save(model, path)
    work_dir = folder / "work"
    work_dir.mkdir()
    attempts: list[Attempt] = []
    trial = SessionTrial(
        inputs=inputs, work_dir=work_dir, seconds=60, record_attempt=attempts.append
    )
    setup = session_setup(path, [("CPUExecutionProvider", {})])
    return Made(setup, facts_of(model), trial, attempts)


@pytest.fixture
def endless(tmp_path: Path) -> Made:
    """Return a model that runs as many rounds as its input says."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Mul", ["x_in", "x_in"], ["x_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x_in", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x_out", TensorProto.FLOAT, [1]),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["rounds", "", "x"], ["y"], body=body)],
        "endless",
        [
            helper.make_tensor_value_info("rounds", TensorProto.INT64, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    return saved(graph, tmp_path, {"rounds": torch.tensor(2**62), "x": torch.ones(1)})


@pytest.fixture
def filled(tmp_path: Path) -> Made:
    """Return a model that makes a tensor of the shape that it is given."""
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["shape"], ["y"])],
        "filled",
        [helper.make_tensor_value_info("shape", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])],
    )
    return saved(graph, tmp_path, {"shape": torch.tensor([2])})


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Return a maker of shell scripts that stand in for Python, which is ``$python`` in them."""

    def make(text: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\npython={sys.executable}\n{text}\n")
        path.chmod(0o700)
        return str(path)

    return make


def children() -> set[str]:
    """Return children of this process, those that ended and were not waited for too."""
    tasks = Path("/proc/self/task")
    return {pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()}


def left(made: Made) -> list[Path]:
    return list(made.trial.work_dir.rglob("*"))


def test_session_that_crashes_costs_its_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    # Repeated optimization of attention in half precision crashes the process, which is why the
    # backend turns it off.
    harmful = {key: value for key, value in session._ENTRIES.items() if "loop_level" not in key}
    monkeypatch.setattr(session, "_ENTRIES", MappingProxyType(harmful))
    module = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True).half()
    report = ait.tune(
        ait.Module(module.eval()),
        [torch.randn(size, size + 3, 64).half() for size in (2, 3)],
        strategy=ait.FirstWinsStrategy(backends=["onnxruntime", "eager"], allow_slower=True),
        reuse_builds=False,
    )
    first, second = report.modules[0].graphs[0].candidates
    assert (first.backend, first.status) == ("onnxruntime", "failed")
    assert first.error is not None
    assert "crashed with SIGSEGV while creating the session" in first.error
    assert "crashed with SIGSEGV while creating the session" in report.summary()
    assert (second.backend, second.status) == ("eager", "won")


@pytest.mark.parametrize("left_of_build", [None, 4.0])
def test_session_that_hangs_is_ended(endless: Made, left_of_build: float | None) -> None:
    before = children()
    start = time.perf_counter()
    with pytest.raises(SessionTrialError) as caught:
        endless.run(seconds=60 if left_of_build else 5, seconds_left=lambda: left_of_build)
    assert time.perf_counter() - start < 30
    assert (caught.value.stage, caught.value.reason) == ("running", "time")
    limit = 4 if left_of_build else 5
    assert f"did not finish within {limit} s while running the session" in str(caught.value)
    assert left(endless) == []
    assert children() == before


def test_what_a_child_started_ends_with_it(
    endless: Made, script: Callable[[str], str], tmp_path: Path
) -> None:
    python = script(f'sleep 1000 & echo $! > {tmp_path / "grandchild"}\nexec "$python" "$@"')
    with pytest.raises(SessionTrialError, match="did not finish"):
        endless.run(python=python, seconds=3)
    until(lambda: gone(int((tmp_path / "grandchild").read_text())))


def test_session_that_takes_all_memory_is_told(filled: Made, script: Callable[[str], str]) -> None:
    python = script('ulimit -v 8000000\nexec "$python" "$@"')
    with pytest.raises(SessionTrialError) as caught:
        filled.run(python=python, inputs={"shape": torch.tensor([2**32])})
    assert (caught.value.stage, caught.value.reason) == ("running", "memory")
    assert "ran out of memory" in str(caught.value)
    assert "while running the session" in str(caught.value)
    assert left(filled) == []


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ("kill -9 $$", "memory", "ran out of memory"),
        ("kill -ABRT $$", "SIGABRT", "crashed with SIGABRT while starting"),
        ("echo std::bad_alloc >&2; kill -ABRT $$", "memory", "ran out of memory"),
        ("echo no such thing >&2; exit 3", "exit", "exit status 3 while starting"),
        ("echo no such thing >&2; exit 3", "exit", "it wrote: no such thing"),
    ],
)
def test_end_of_the_process_is_told(
    filled: Made, script: Callable[[str], str], text: str, reason: str, words: str
) -> None:
    with pytest.raises(SessionTrialError) as caught:
        filled.run(python=script(text))
    assert (caught.value.stage, caught.value.reason) == ("starting", reason)
    assert words in str(caught.value)


def test_python_that_is_not_there_is_told(filled: Made) -> None:
    with pytest.raises(SessionTrialError, match="isolate=False"):
        filled.run(python="/nowhere/python")


def test_error_of_the_runtime_is_no_crash(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [2, 2]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "x"], ["y"], name="product")],
        "no_kernel",
        values[:1],
        values[1:],
    )
    made = saved(graph, tmp_path, {"x": torch.ones(2, 2, dtype=torch.bfloat16)})
    with pytest.raises(BuildError) as caught:
        made.run()
    assert not isinstance(caught.value, SessionTrialError)
    assert caught.value.step == "session"
    assert "has no kernel for operator MatMul" in str(caught.value)
    assert left(made) == []


def test_error_in_the_run_is_left_to_the_check(filled: Made) -> None:
    filled.run(inputs={"shape": torch.tensor([-1])})
    (attempt,) = filled.attempts
    assert (attempt.step, attempt.succeeded) == (STEP, False)
    assert attempt.detail.startswith("running the session: ")


def test_session_that_is_fine_costs_little_and_leaves_nothing(filled: Made) -> None:
    before = children()
    start = time.perf_counter()
    filled.run()
    assert time.perf_counter() - start < 2
    assert [(attempt.step, attempt.succeeded) for attempt in filled.attempts] == [(STEP, True)]
    assert left(filled) == []
    assert children() == before


def test_child_loads_the_runtime_and_nothing_of_ours(
    filled: Made, script: Callable[[str], str], tmp_path: Path
) -> None:
    filled.run(python=script(f'exec "$python" -X importtime "$@" 2>{tmp_path / "imports"}'))
    lines = (tmp_path / "imports").read_text().splitlines()
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert {"numpy", "onnxruntime"} <= loaded
    assert not {"aitune_core", "aitune_backend_onnxruntime", "torch", "onnx"} & loaded


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, (2, 3)) for dtype in ONNX_TYPES), (torch.float32, ()), (torch.float32, (0, 3))],
    ids=str,
)
def test_inputs_of_any_type_and_shape_arrive(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    number = ONNX_TYPES[dtype]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "same",
        [helper.make_tensor_value_info("x", number, shape)],
        [helper.make_tensor_value_info("y", number, shape)],
    )
    made = saved(graph, tmp_path, {"x": torch.zeros(shape).to(dtype)})
    made.run()
    assert [attempt.succeeded for attempt in made.attempts] == [True], made.attempts


def test_child_ends_with_its_parent(endless: Made, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    parent = textwrap.dedent(f"""
        import sys, torch
        from pathlib import Path
        from aitune_backend_onnxruntime.model_file import facts_of, read_model
        from aitune_backend_onnxruntime.session import session_setup
        from aitune_backend_onnxruntime.session_trial import SessionTrial
        path = Path({str(endless.setup.path)!r})
        SessionTrial(
            inputs={{"rounds": torch.tensor(2**62), "x": torch.ones(1)}},
            work_dir=Path({str(endless.trial.work_dir)!r}),
            seconds=100,
            python={str(tmp_path / "python")!r},
        ).run(session_setup(path, [("CPUExecutionProvider", {{}})]), facts_of(read_model(path)))
    """)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $$ > {told}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        until(lambda: any(endless.trial.work_dir.glob("trial-*/notes")))
        notes = next(iter(endless.trial.work_dir.glob("trial-*/notes")))
        until(lambda: "running" in notes.read_text())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: gone(int(told.read_text())))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Tell whether a process has ended; one that nobody waited for has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_build_tries_the_session_first(case: MakeCase) -> None:
    made = case(nn.Linear(3, 4), torch.randn(2, 3))
    made.build(isolate=True)
    assert made.steps == [(STEP, True), ("export with dynamo", True)]
    assert made.attempts[0].detail.startswith("created and run in ")
    assert {path.name for path in made.request.work_dir.iterdir()} == {
        "model_raw.onnx",
        "model_raw.onnx.data",
    }


def test_build_without_isolation_starts_no_process(
    case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    made = case(nn.Linear(3, 4), torch.randn(2, 3))
    made.build(isolate=False)
    assert made.steps == [("export with dynamo", True)]


def test_largest_call_is_tried(case: MakeCase) -> None:
    made = case(nn.Linear(3, 4), torch.randn(2, 3))
    small, large = (torch.zeros(0, 3),), (torch.ones(1, 3),)
    trial = trial_of(attrs.evolve(made.request, samples=(small, large)), 5)
    assert trial.inputs["t0"] is large[0]
