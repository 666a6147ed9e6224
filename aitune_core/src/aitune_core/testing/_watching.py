"""What code prints, and what it leaves changed in the process."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

__all__ = ["Watched", "watching"]


#: Values whose text is longer are not shown.
_LONG: Final = 100


@attrs.define
class Watched:
    """What was noticed.

    Attributes:
        printed: What went to standard output or standard error, from native code too, and
            warnings.
        changed: What of the process is not as it was, in words.
    """

    printed: str = ""
    changed: list[str] = attrs.field(factory=list)


@contextlib.contextmanager
def watching(seen: Watched) -> Iterator[None]:
    """Note what the code inside prints and changes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = _state()
        with _printed(seen):
            yield
        after = _state()
    seen.printed += "".join(f"{each.category.__name__}: {each.message}\n" for each in caught)
    for name, value in before.items():
        if after[name] != value:
            shown = "" if len(repr(value)) > _LONG else f": was {value!r}, is {after[name]!r}"
            seen.changed.append(f"{name}{shown}")


def _state() -> Mapping[str, Any]:
    return {
        "gradients enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads of torch": torch.get_num_threads(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "filters of warnings": list(warnings.filters),
        "random numbers of torch": torch.get_rng_state().tolist(),
        "random numbers of Python": random.getstate(),
        "level of the root logger": logging.root.level,
        "handlers of the root logger": list(logging.root.handlers),
        "working directory": Path.cwd(),
    }


@contextlib.contextmanager
def _printed(seen: Watched) -> Iterator[None]:
    """Take what is written to the file descriptors 1 and 2, and to Python's streams."""
    streams = io.StringIO()
    with tempfile.TemporaryFile() as file:
        _flush()
        kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        try:
            for descriptor in kept:
                os.dup2(file.fileno(), descriptor)
            with contextlib.redirect_stdout(streams), contextlib.redirect_stderr(streams):
                yield
        finally:
            _flush()
            for descriptor, copy in kept.items():
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
            seen.printed += streams.getvalue() + file.read().decode(errors="replace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
