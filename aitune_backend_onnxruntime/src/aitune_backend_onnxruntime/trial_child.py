"""Run in a process of its own: makes a session, runs it once, and says how far it came.

Nothing of aitune and no torch: this file is started by its path and takes one line of JSON. What it
has to say goes to a file, line by line, so that a crash loses nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

__all__: list[str] = []

#: ``prctl`` option: which signal this process gets when its parent ends.
_DEATH_SIGNAL: Final = 1
#: Letters of an error that are handed over.
_LONGEST: Final = 4000


def main() -> int:
    """Do what the line of JSON on standard input asks for; returns the exit status."""
    job = json.loads(sys.stdin.buffer.readline())
    _end_with(job["parent"])
    sys.path[:] = job["search_path"]
    with Path(job["notes"]).open("a", encoding="utf-8") as notes:

        def note(**entry: object) -> None:
            notes.write(json.dumps(entry) + "\n")
            notes.flush()

        try:
            note(stage="loading")
            session, sample = _loaded(job, note)
            note(stage="running")
            session.run_with_ort_values([one.name for one in session.get_outputs()], sample)
        except Exception as error:  # noqa: BLE001 - all that ONNX Runtime raises
            note(error=f"{type(error).__name__}: {error}"[:_LONGEST])
            return 1
        note(stage="done")
        if job["optimized"] is not None:
            del session
            _write_optimized(job)
    return 0


def _end_with(parent: int) -> None:
    """End when the parent does, whatever is going on here by then."""
    if sys.platform == "linux":
        # As a signal of the kernel it also ends code that never lets go of Python's lock.
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.name == "posix":
        import resource  # noqa: PLC0415 - not on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.getppid() != parent:
            os._exit(1)

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _loaded(job: dict[str, Any], note: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
    for library in job["libraries"]:
        with contextlib.suppress(OSError):  # what is missed then is told by ONNX Runtime
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import onnxruntime  # noqa: PLC0415 - after search path and libraries are set

    if job["preload"]:
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()
    sample = _sample(job["sample"])
    note(stage="creating")
    return _session(job), sample


def _session(job: dict[str, Any], optimized: str | None = None) -> Any:  # noqa: ANN401
    import onnxruntime  # noqa: PLC0415 - as above

    options = onnxruntime.SessionOptions()
    options.log_severity_level = job["log_severity"]
    options.intra_op_num_threads = job["threads"]
    for key, value in job["entries"].items():
        options.add_session_config_entry(key, value)
    if optimized is not None:
        options.optimized_model_filepath = optimized
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", Path(optimized).name + ".w"
        )
    names = [name for name, _ in job["providers"]]
    session = onnxruntime.InferenceSession(
        job["model"],
        sess_options=options,
        providers=names,
        provider_options=[settings for _, settings in job["providers"]],
        enable_fallback=0,
    )
    session.disable_fallback()
    got = session.get_providers()
    if got != names:
        msg = f"ONNX Runtime left out providers in the child process: wanted {names}, got {got}"
        raise RuntimeError(msg)
    return session


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Read inputs: raw bytes in one file, with dtypes that NumPy has for them."""
    import numpy as np  # noqa: PLC0415 - as above
    from onnxruntime import OrtValue  # noqa: PLC0415 - as above

    content = Path(sample["file"]).read_bytes()
    values, start = {}, 0
    for entry in sample["inputs"]:
        dtype = np.dtype(entry["dtype"])
        count = int(np.prod(entry["shape"], dtype=np.int64))
        array = np.frombuffer(content, dtype, count, start).reshape(entry["shape"]).copy()
        start += array.nbytes
        values[entry["name"]] = OrtValue.ortvalue_from_numpy_with_onnx_type(array, entry["type"])
    return values


def _write_optimized(job: dict[str, Any]) -> None:
    """Write the graph that the session runs. A failure costs only what it would tell."""
    with contextlib.suppress(Exception):
        _session(job, job["optimized"])
    Path(job["optimized"] + ".w").unlink(missing_ok=True)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # Not through Python's end: what libraries do there says nothing about the session.
    os._exit(status)
