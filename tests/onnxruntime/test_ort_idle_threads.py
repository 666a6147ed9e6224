"""Which threads stand in the way of capturing a CUDA graph."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from aitune_backend_onnxruntime.idle_threads import only_thread

COMPILED = """
import threading, torch
from aitune_backend_onnxruntime.idle_threads import only_thread

torch.compile(lambda x: x + 1)(torch.ones(3))
assert len(threading.enumerate()) > 1, "nothing is shown where the compiler leaves no thread"
print(only_thread())
stop = threading.Event()
threading.Thread(target=stop.wait).start()
print(only_thread())
stop.set()
"""


def test_another_thread_is_in_the_way_until_it_ends() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert not only_thread()
    stop.set()
    thread.join()
    assert only_thread()


def test_threads_that_a_compiler_leaves_behind_are_not_in_the_way() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED],
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == ["True", "False"], result.stderr
