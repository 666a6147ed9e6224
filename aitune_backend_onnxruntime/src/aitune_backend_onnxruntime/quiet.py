"""Silence for the exporters, which warn and log about their own insides."""

from __future__ import annotations

import importlib
import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quiet_export"]

_NOISY: Final = ("torch.onnx", "torch.export", "torch.fx", "torch._export", "torch._dynamo")
_NOISY_TOO: Final = (
    "torch._subclasses",
    "torch._functorch",
    "torch.utils._sympy",
    "onnxscript",
    "onnx_ir",
    "onnx",
)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Drop the warnings and log records of torch's exporters while the block runs.

    Note:
        Python's warning filters belong to the process: warnings that other threads give while
        the block runs are dropped too.
    """
    names = {*_NOISY, *_NOISY_TOO}
    for name in tuple(logging.root.manager.loggerDict):
        if name.startswith(tuple(f"{parent}." for parent in names)):
            names.add(name)
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    # The tracer prints whole graphs to standard output when it fails. Torch has a switch for it,
    # which the tracer itself turns on whatever it was, so its way to print is taken away.
    prints = torch._C._jit_is_onnx_log_enabled()  # noqa: SLF001
    log = torch._C._jit_onnx_log  # noqa: SLF001
    # And torch.export prints the graph up to a branch on a value to standard error.
    tracing = importlib.import_module("torch.export._trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch._C._jit_onnx_log = _drop  # noqa: SLF001
            vars(tracing)["print"] = _drop
            for logger in loggers:
                logger.setLevel(logging.CRITICAL + 1)
            yield
        finally:
            torch._C._jit_onnx_log = log  # noqa: SLF001
            vars(tracing).pop("print", None)
            torch._C._jit_set_onnx_log_enabled(prints)  # noqa: SLF001
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _drop(*_parts: object, **_options: object) -> None:
    """Print nothing."""
