"""Sessions of one exported model that differ in speed: the fastest one that is right is kept."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import attrs
import torch

from aitune_core.backend import Attempt
from aitune_core.errors import BuildError, ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aitune_backend_onnxruntime.engine import ExportedModel, ONNXRuntimeEngine
    from aitune_core.backend import BuildRequest

__all__ = ["faster_of", "fastest"]

#: Share of the time below which another session counts as faster, since timing is not exact.
_FASTER: Final = 0.98


def fastest(
    engine: ONNXRuntimeEngine,
    request: BuildRequest,
    opened: Callable[[ExportedModel], ONNXRuntimeEngine],
) -> ONNXRuntimeEngine:
    """Try what may be faster than an engine, one thing after the other, and keep what is.

    Args:
        engine: A checked engine.
        request: Where it was built for; gets a note of each try.
        opened: Opens and checks another session of the model.

    Returns:
        The engine, or one that replaced it; all others are closed.
    """
    for step, change in _changes(engine.model):
        changed = change(engine.model)
        engine = faster_of(step, engine, request, functools.partial(opened, changed))
    return engine


def _changes(
    model: ExportedModel,
) -> Iterator[tuple[str, Callable[[ExportedModel], ExportedModel]]]:
    if model.rewritten is not None:
        yield "rewritten graph", lambda model: attrs.evolve(model, uses_rewritten=True)
    if "Conv" in model.facts.operators:
        step = "channels first" if model.channels_last else "channels last"
        yield step, lambda model: attrs.evolve(model, channels_last=not model.channels_last)


def faster_of(
    step: str,
    engine: ONNXRuntimeEngine,
    request: BuildRequest,
    make: Callable[[], ONNXRuntimeEngine],
) -> ONNXRuntimeEngine:
    """Make another engine and return the faster one; what is not returned is closed.

    Args:
        step: What is tried, for the report.
        engine: A checked engine.
        request: What both are for.
        make: Makes and checks the other one.
    """
    other: ONNXRuntimeEngine | None = None
    try:
        other = make()
        before, after = request.latencies([engine, other])
    except (BuildError, ValidationError, torch.OutOfMemoryError) as error:
        request.record_attempt(Attempt(step, succeeded=False, detail=str(error)))
        if other is not None:
            other.close()
        return engine
    except BaseException:
        for made in filter(None, (engine, other)):
            made.close()
        raise
    faster = after < _FASTER * before
    detail = f"{after:.3f} ms a call, {before:.3f} ms without"
    request.record_attempt(Attempt(step, succeeded=faster, detail=detail))
    (engine if faster else other).close()
    return other if faster else engine
