"""Fixtures of the core's tests."""

from __future__ import annotations

import pytest
from aitune_core import _measurement


@pytest.fixture(autouse=True)
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure few rounds without pauses: these tests look at what is chosen, not at how fast."""
    monkeypatch.setattr(_measurement, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(_measurement, "_BUDGET_SECONDS", 0.0)
