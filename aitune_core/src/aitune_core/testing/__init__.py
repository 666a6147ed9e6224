"""Tests for authors of backends: subclass `BackendConformance`. Needs pytest."""

from __future__ import annotations

from aitune_core.testing.conformance import BackendConformance

__all__ = ["BackendConformance"]
