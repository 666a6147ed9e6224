"""Silence for PyTorch's compilers, which warn, log and print about their own insides."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import warnings
from collections.abc import Iterator

__all__ = ["quiet_compilers"]


class _ThisThread(logging.Filter):
    """Drops what PyTorch logs in one thread, unless the user asked for it in detail."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        # What is below a warning was asked for with TORCH_LOGS.
        dropped = record.levelno >= logging.WARNING and record.name.partition(".")[0] == "torch"
        return not (dropped and record.thread == self._thread)


@contextlib.contextmanager
def quiet_compilers() -> Iterator[None]:
    """Drop the warnings, log records and prints of PyTorch's compilers while the block runs.

    Note:
        Python's warning filters belong to the process: warnings that other threads give while
        the block runs are dropped too.
    """
    # Prints the graph up to a branch on a value.
    tracing = importlib.import_module("torch.export._trace")
    this_thread = _ThisThread()
    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(this_thread)
    vars(tracing)["print"] = _drop
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        vars(tracing).pop("print", None)
        for handler in handlers:
            handler.removeFilter(this_thread)


def _handlers() -> list[logging.Handler]:
    """Return the handlers that may get what PyTorch logs."""
    loggers = [
        logger
        for name, logger in tuple(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch"
    ]
    found = [handler for logger in (logging.root, *loggers) for handler in logger.handlers]
    return list(dict.fromkeys([*found, *filter(None, [logging.lastResort])]))


def _drop(*_parts: object, **_options: object) -> None:
    """Print nothing."""
