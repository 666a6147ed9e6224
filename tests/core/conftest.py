"""Fixtures of the core's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import saved

from aitune_core import _measurement, _stopwatch


@pytest.fixture(autouse=True)
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure few rounds without pauses: these tests look at what is chosen, not at how fast."""
    monkeypatch.setattr(_stopwatch, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(_measurement, "_BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(_measurement, "_LOOKS", (2, 4))


@pytest.fixture
def checkpoint(tmp_path: Path, quick_measurement: None) -> Path:
    """Return a checkpoint of ``2 * x + 3``, tuned for two to five rows of four columns."""
    path = tmp_path / "model.ait"
    saved(path)
    return path
