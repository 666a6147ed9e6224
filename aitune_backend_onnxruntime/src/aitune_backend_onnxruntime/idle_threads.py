"""Threads of a process that call nothing on a GPU."""

from __future__ import annotations

import sys
import threading
from typing import Final

__all__ = ["only_thread"]

#: Names of threads that never use a GPU: the first is started by the exporters, the others pass
#: sources to PyTorch's compiling processes.
_IDLE_NAMES: Final = frozenset({"tqdm_monitor", "InductorSubproc", "subproc_worker_timer"})


def only_thread() -> bool:
    """Whether the process has no thread of Python besides this one, or none that uses a GPU."""
    me = threading.current_thread()
    others = [
        thread
        for thread in threading.enumerate()
        if thread is not me and thread.name not in _IDLE_NAMES
    ]
    return not others or _compilers_pool().issuperset(others)


def _compilers_pool() -> frozenset[threading.Thread]:
    """Return the threads in which PyTorch compiles; they outlive what they compiled.

    They work only while another thread waits for a compilation, and that one is no idle thread.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    if pool is None or not pool.cache_info().currsize:
        return frozenset()
    return frozenset(pool()._threads)  # noqa: SLF001 - there is no public way
