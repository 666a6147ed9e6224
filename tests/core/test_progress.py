from __future__ import annotations

import contextlib
import logging
import sys
import types
from typing import Any

import pytest
import torch
from fakes import AffineEngine, FakeBackend
from samples import batches, mlp, recorded

from aitune_core import BuildError, Measurement, Outcome
from aitune_core._progress import Progress, progress

(GRAPH,) = recorded(mlp(), *((x,) for x in batches(2)))


def outcomes() -> list[Outcome]:
    backend, time = FakeBackend(), Measurement(p50_ms=1.0, p90_ms=1.0, p99_ms=1.0, calls=1)
    engine = AffineEngine(GRAPH.spec, torch.device("cpu"), [])
    return [
        Outcome(backend=backend, engine=engine),
        Outcome(backend=backend, engine=engine, measurement=time, eager=time),
        Outcome(backend=backend, error=BuildError("no [bold] luck\nsecond line")),
        Outcome(backend=backend, error=BuildError("")),
    ]


class Console:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str, *, highlight: bool) -> None:
        assert not highlight
        self.lines.append(text)


class Status:
    def __init__(self) -> None:
        self.console = Console()
        self.texts: list[str] = []

    def update(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("outcome", outcomes())
def test_every_outcome_can_be_told(outcome: Outcome, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aitune_core"):
        observer = Progress()
        observer.aitune_candidate_started("net", GRAPH.spec, outcome.backend)
        observer.aitune_candidate_finished("net", GRAPH.spec, outcome)
    started, finished = caplog.messages
    for message in (started, finished):
        assert "net" in message
        assert "graph_0" in message
        assert "fake" in message
        assert "\n" not in message
    assert ("correct" in finished) == outcome.succeeded
    assert ("failed" in finished) != outcome.succeeded


def test_status_line_gets_text_that_is_no_markup() -> None:
    status = Status()
    observer = Progress(status)
    observer.aitune_candidate_started("net[0]", GRAPH.spec, FakeBackend())
    observer.aitune_candidate_finished("net[0]", GRAPH.spec, outcomes()[2])
    observer.aitune_measuring_started("net[0]", GRAPH.spec, outcomes()[:2])
    assert status.texts == [
        r"net\[0]: graph_0: building with fake",
        r"net\[0]: graph_0: timing eager and fake, fake",
    ]
    assert r"no \[bold] luck" in status.console.lines[0]


def test_without_a_terminal_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with progress() as observer:
        assert observer._status is None


@pytest.mark.parametrize("installed", [True, False])
def test_terminal_is_drawn_on_when_rich_is_there(
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
) -> None:
    drawn: list[Any] = []

    class FakeConsole:
        def __init__(self, *, stderr: bool) -> None:
            assert stderr

        def status(self, text: str) -> Any:
            drawn.append(text)
            return contextlib.nullcontext("status")

    module = types.ModuleType("rich.console")
    module.Console = FakeConsole  # type: ignore[attr-defined]
    package = types.ModuleType("rich")
    monkeypatch.setitem(sys.modules, "rich", package if installed else None)
    monkeypatch.setitem(sys.modules, "rich.console", module if installed else None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress() as observer:
        assert observer._status == ("status" if installed else None)
    assert bool(drawn) == installed
