"""The first creation and run of a session, in a process of its own.

A session is native code on a graph that nobody ran before: it may crash, hang or take all memory.
Here that ends a child process, and costs this one an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import onnx
import torch

from aitune_backend_onnxruntime.dtypes import onnx_type
from aitune_backend_onnxruntime.errors import SessionTrialError
from aitune_backend_onnxruntime.model_file import ModelFileError, read_model
from aitune_backend_onnxruntime.session import session_error
from aitune_core.backend import Attempt

if TYPE_CHECKING:
    from torch import Tensor

    from aitune_backend_onnxruntime.model_file import ModelFacts
    from aitune_backend_onnxruntime.session import SessionSetup
    from aitune_core.backend import BuildRequest

__all__ = ["SessionTrial", "trial_of"]

_CHILD: Final = Path(__file__).with_name("trial_child.py")
_STEP: Final = "session in a child process"
_STAGES: Final = {
    "starting": "starting",
    "loading": "loading ONNX Runtime",
    "creating": "creating the session",
    "running": "running the session",
}
_NO_MEMORY: Final = re.compile(
    r"bad[_ ]alloc|out of memory|failed to allocate memory|cannot allocate memory|MemoryError",
    re.IGNORECASE,
)
#: How much of the child's standard error is told, in characters.
_TAIL: Final = 1000
#: Libraries that a process with CUDA has loaded, wherever it found them, in the order of need.
_LIBRARIES: Final = (
    *("cudart", "nvJitLink", "nvrtc", "cublasLt", "cublas", "curand", "cufft", "cudnn"),
    *("nvinfer", "nvonnxparser"),
)
_LIBRARY: Final = re.compile(rf"/lib({'|'.join(_LIBRARIES)})\.so")


@attrs.frozen(kw_only=True)
class SessionTrial:
    """Creates and runs sessions in child processes.

    Args:
        inputs: Inputs of one call, by name.
        work_dir: Folder for files, which are removed again.
        seconds: How long one may take.
        seconds_left: Seconds that the build may still take; None where there is no limit.
        record_attempt: Notes a session that was tried.
        python: The Python to start.
    """

    inputs: Mapping[str, Tensor]
    work_dir: Path
    seconds: float
    seconds_left: Callable[[], float | None] = lambda: None
    record_attempt: Callable[[Attempt], None] = lambda _: None
    python: str = attrs.field(factory=lambda: sys.executable)

    def run(self, setup: SessionSetup, facts: ModelFacts) -> onnx.ModelProto | None:
        """Create a session and run it once.

        An error that ONNX Runtime raises in the run is left to the check of the engine, which
        says more about it.

        Returns:
            The graph that it runs, with the copies between devices that ONNX Runtime put in,
            without weights. None where it cannot be told.

        Raises:
            SessionTrialError: It crashed, ran out of memory or did not end in time.
            BuildError: ONNX Runtime refuses to create the session.
        """
        start = time.perf_counter()
        left = self.seconds_left()
        limit = self.seconds if left is None else max(0.0, min(self.seconds, left))
        if not self.python or getattr(sys, "frozen", False):
            msg = (
                "a session cannot be tried in a child process: this program has no Python to "
                "start; isolate=False does without"
            )
            raise SessionTrialError(msg, stage="starting", reason="exit")
        with tempfile.TemporaryDirectory(prefix="trial-", dir=self.work_dir) as folder:
            ended = _run_child(self.python, self._job(setup, facts, Path(folder)), limit)
            seconds = time.perf_counter() - start
            self._judge(ended, limit, setup, facts, seconds)
            return _optimized(Path(folder))

    def _judge(
        self, ended: _Ended, limit: float, setup: SessionSetup, facts: ModelFacts, seconds: float
    ) -> None:
        """Raise for how a child ended, or note that it did well."""
        if ended.stage == "done":
            detail = f"created and run in {seconds:.1f} s"
            self.record_attempt(Attempt(_STEP, succeeded=True, detail=detail))
            return
        stage = _STAGES[ended.stage]
        reason, words = ended.verdict(limit)
        if reason is not None:
            msg = f"ONNX Runtime {words} while {stage}, in a child process"
            if ended.stderr:
                msg += f"; it wrote: {ended.stderr}"
            raise SessionTrialError(msg, stage=ended.stage, reason=reason)
        if ended.stage == "creating":
            raise session_error(ended.error, setup.provider_names[0], facts)
        if ended.stage != "running":
            msg = f"the child process failed while {stage}: {ended.error}"
            raise SessionTrialError(msg, stage=ended.stage, reason="exit")
        self.record_attempt(Attempt(_STEP, succeeded=False, detail=f"{stage}: {ended.error}"))

    def _job(self, setup: SessionSetup, facts: ModelFacts, folder: Path) -> dict[str, Any]:
        values = [(value.name, self.inputs[value.name]) for value in facts.inputs]
        with (folder / "inputs").open("wb") as file:
            for _, tensor in values:
                file.write(_bytes(tensor))
        on_cuda = any(name.startswith("CUDA") for name in setup.provider_names)
        compiles = any(name.startswith("Tensorrt") for name in setup.provider_names)
        libraries = [] if setup.on_cpu else _loaded_libraries()
        return {
            "parent": os.getpid(),
            "search_path": sys.path,
            "libraries": libraries,
            "preload": not (setup.on_cpu or libraries),
            "notes": str(folder / "notes"),
            "model": str(setup.path.resolve()),
            "threads": setup.threads,
            "entries": dict(setup.entries),
            "log_severity": setup.log_severity,
            "providers": [
                # A stream of this process means nothing in another one.
                (name, {key: text for key, text in options.items() if key != "user_compute_stream"})
                for name, options in setup.providers
            ],
            "sample": {
                "file": str(folder / "inputs"),
                "inputs": [
                    {
                        "name": name,
                        "shape": list(tensor.shape),
                        "type": onnx_type(tensor.dtype, name),
                        "dtype": f"u{tensor.dtype.itemsize}",
                    }
                    for name, tensor in values
                ],
            },
            # Compiled nodes cannot be written, and on the CPU there is nothing to copy.
            "optimized": str(folder / "optimized") if on_cuda and not compiles else None,
        }


def trial_of(request: BuildRequest, seconds: float) -> SessionTrial:
    """Return a trial with the largest of the recorded calls, one without empty tensors first."""

    def size(sample: tuple[Tensor, ...]) -> tuple[bool, int]:
        return all(tensor.numel() for tensor in sample), sum(tensor.nbytes for tensor in sample)

    sample = max(request.samples, key=size)
    return SessionTrial(
        inputs={spec.name: one for spec, one in zip(request.graph.inputs, sample, strict=True)},
        work_dir=request.work_dir,
        seconds=seconds,
        seconds_left=request.seconds_left,
        record_attempt=request.record_attempt,
    )


@attrs.frozen(kw_only=True)
class _Ended:
    """How a child process ended; ``status`` is None where its time was over."""

    status: int | None
    stage: str
    error: str
    stderr: str

    def verdict(self, limit: float) -> tuple[str | None, str]:
        """Return why no session came of it, and in words; None for an error that was raised."""
        if self.status is None:
            return "time", f"did not finish within {limit:.0f} s"
        if _NO_MEMORY.search(self.error) or (
            not self.error and self.status and _NO_MEMORY.search(self.stderr)
        ):
            return "memory", f"ran out of memory{f' ({self.error})' if self.error else ''}"
        if self.error:
            return None, ""
        if self.status >= 0:
            return "exit", f"ended with exit status {self.status}"
        name = signal.Signals(-self.status).name
        if name == "SIGKILL":
            return "memory", "ran out of memory (killed by SIGKILL, as the system does then)"
        return name, f"crashed with {name}"


def _run_child(python: str, job: dict[str, Any], limit: float) -> _Ended:
    """Start the child and wait for its end; whatever happens, none is left behind."""
    notes = Path(job["notes"])
    errors = notes.with_name("errors")
    with errors.open("wb") as said, _starting(python):
        child = subprocess.Popen(  # noqa: S603 - this Python, on a file of this package
            # -I: neither the environment nor the current folder decides what is imported.
            [python, "-I", str(_CHILD)],
            stdin=subprocess.PIPE,  # open until the end, by which the child sees that of its parent
            stdout=said,
            stderr=said,
            cwd=notes.parent,
            start_new_session=True,
        )
    status: int | None = None
    try:
        assert child.stdin is not None  # noqa: S101 - a pipe was asked for
        with contextlib.suppress(BrokenPipeError):  # it ended already; its status says how
            child.stdin.write(json.dumps(job).encode() + b"\n")
            child.stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(limit)
    finally:
        _end(child)
    entries = [json.loads(line) for line in _lines(notes)]
    stages = [entry["stage"] for entry in entries if "stage" in entry]
    failures = [entry["error"] for entry in entries if "error" in entry]
    return _Ended(
        status=status,
        stage=stages[-1] if stages else "starting",
        error=" ".join("".join(failures).split()),
        stderr=errors.read_text(errors="replace").strip()[-_TAIL:],
    )


@contextlib.contextmanager
def _starting(python: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        msg = (
            f"a session cannot be tried in a child process: {python} does not start ({error}); "
            "isolate=False does without"
        )
        raise SessionTrialError(msg, stage="starting", reason="exit") from error


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and what it has started."""
    if child.returncode is None and os.name == "posix":
        os.killpg(child.pid, signal.SIGKILL)
    elif child.returncode is None:
        child.kill()
    child.wait()
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # what it did not read is of no use any more
            child.stdin.close()


def _lines(notes: Path) -> list[str]:
    """Return whole lines: a child may end in the middle of one."""
    if not notes.exists():
        return []
    return notes.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()


def _optimized(folder: Path) -> onnx.ModelProto | None:
    path = folder / "optimized"
    try:
        return read_model(path) if path.exists() else None
    except ModelFileError:
        return None  # cut off by the time limit


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _loaded_libraries() -> list[str]:
    """Return paths of CUDA's libraries that this process has loaded; none where it cannot tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    found = [
        (_LIBRARIES.index(match[1]), path) for path in paths if (match := _LIBRARY.search(path))
    ]
    return [path for _, path in sorted(found)]
