"""Checkpoints of small modules, with the plugin of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_plugin import registry
from fakes import AffineBackend
from samples import Affine, batches, tuned
from torch import nn

from aitune_core import Module, load, save

REGISTRY = registry()


def saved(path: Path, module: nn.Module | None = None, data: Any = None) -> Module:
    model = tuned(
        (module or Affine()).eval(),
        batches(2, 5) if data is None else data,
        backend=AffineBackend(),
        name="net",
    )
    save(model, path, registry=REGISTRY)
    return model


def loaded(path: Path, **options: Any) -> Module:
    return load(path, registry=REGISTRY, **options)
