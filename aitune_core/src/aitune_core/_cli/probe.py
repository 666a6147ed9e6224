"""Tries one backend and writes what came of it to a file: ``python -m`` this, NAME and FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import attrs

from aitune_core._plugins import default_registry
from aitune_core.backend import Diagnosis
from aitune_core.errors import AituneError, BackendUnavailableError

__all__ = ["diagnoses"]


def diagnoses(name: str) -> list[Diagnosis]:
    """Return what came of trying a backend."""
    try:
        return list(default_registry().backend(name).diagnose())
    except AituneError as error:
        repair = error.install_hint if isinstance(error, BackendUnavailableError) else None
        return [Diagnosis(part="", available=False, reason=str(error), repair=repair or "")]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps([attrs.asdict(one) for one in diagnoses(sys.argv[1])]))
