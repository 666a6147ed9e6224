"""Fixtures of every test: a private cache folder, and torch as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The fakes are imported by name from other folders and from subprocesses.
sys.path.insert(0, str(Path(__file__).parent / "core"))

settings.register_profile("aitune", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("aitune")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder, which no other test sees."""
    folder = tmp_path / "aitune-cache"
    monkeypatch.setenv("AITUNE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Seed torch before each test, and check that the test left grad mode and dtype alone."""
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
