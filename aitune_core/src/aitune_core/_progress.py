"""Progress of a tuning: a line on the terminal through rich, or log records without it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aitune_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from aitune_core.backend import Backend
    from aitune_core.results import Outcome
    from aitune_core.specs import GraphSpec

__all__ = ["Progress", "progress"]

_log = logging.getLogger("aitune_core")


class Progress:
    """An observer that tells what a tuning is doing.

    Args:
        status: A rich status line to update; None writes log records.
    """

    def __init__(self, status: Any = None) -> None:  # noqa: ANN401 - rich is optional
        self._status = status

    def say(self, text: str) -> None:
        """Say one thing."""
        _log.info(text)
        if self._status is not None:
            self._status.console.print(f"[dim]aitune[/dim] {_escaped(text)}", highlight=False)

    @hookimpl
    def aitune_candidate_started(
        self, module_name: str, graph: GraphSpec, backend: Backend
    ) -> None:
        """Show which candidate is being built."""
        self._show(f"{module_name}: {graph.name}: building with {backend.name}")

    def _show(self, text: str) -> None:
        """Show what is being done, until something else is."""
        _log.info(text)
        if self._status is not None:
            self._status.update(_escaped(text))

    @hookimpl
    def aitune_measuring_started(
        self, module_name: str, graph: GraphSpec, outcomes: Sequence[Outcome]
    ) -> None:
        """Show which candidates are being timed."""
        names = ", ".join(outcome.backend.name for outcome in outcomes)
        self._show(f"{module_name}: {graph.name}: timing eager and {names}")

    @hookimpl
    def aitune_candidate_finished(
        self, module_name: str, graph: GraphSpec, outcome: Outcome
    ) -> None:
        """Say what became of a candidate."""
        speedup = outcome.speedup
        if outcome.succeeded:
            result = "correct" if speedup is None else f"correct, {speedup:.2f} x eager"
        else:
            lines = str(outcome.error).splitlines() or [type(outcome.error).__name__]
            result = f"failed: {lines[0]}"
        self.say(
            f"{module_name}: {graph.name}: {outcome.backend.name}: {result} "
            f"({outcome.seconds.build:.1f} s)"
        )


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Show progress on a terminal when rich is installed, else write log records."""
    if not sys.stderr.isatty():
        yield Progress()
        return
    try:
        from rich.console import Console  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        yield Progress()
        return
    console = Console(stderr=True)
    with console.status("recording") as status:
        yield Progress(status)
