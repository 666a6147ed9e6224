"""Collects the rows of the sweep, prints them, and writes docs/support.md if asked to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import pytest

#: Rows by position of the family; they hold what `outcome.sweep` returned.
_ROWS: Final = pytest.StashKey[dict[int, Any]]()

# transformers asks the hub about models unless told not to.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def add_row(pytestconfig: pytest.Config) -> Callable[[int, Any], None]:
    """Return a function that keeps a row for the table."""
    return pytestconfig.stash.setdefault(_ROWS, {}).__setitem__


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as possible: the sweep asks whether numbers are right, not how fast."""
    monkeypatch.setattr("aitune_core._measurement._BUDGET_SECONDS", 0.0)
    monkeypatch.setattr("aitune_core._measurement._LOOKS", (2, 4))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Print the table; write it where the whole sweep passed and AITUNE_SWEEP_WRITE is 1."""
    rows = config.stash.get(_ROWS, {})
    if not rows:
        return
    # Not at the top: without transformers there is no sweep, and this file is loaded all the same.
    from .families import FAMILIES  # noqa: PLC0415
    from .table import DOCUMENT, document, terminal_table  # noqa: PLC0415

    outcomes = [rows[position] for position in sorted(rows)]
    terminalreporter.section("sweep")
    for line in terminal_table(outcomes):
        terminalreporter.write_line(line)
    if os.environ.get("AITUNE_SWEEP_WRITE") != "1":
        return
    if exitstatus != pytest.ExitCode.OK or len(outcomes) != len(FAMILIES):
        terminalreporter.write_line(f"{DOCUMENT} is not written: not every family passed")
        return
    DOCUMENT.write_text(document(outcomes), encoding="utf-8")
    terminalreporter.write_line(f"written: {DOCUMENT}")
