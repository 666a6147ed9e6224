"""Of two engines the faster one is kept, and the other one closed; what was tried is noted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from aitune_backend_onnxruntime.engine import RewrittenModel
from aitune_backend_onnxruntime.variants import faster_of, fastest
from aitune_core.errors import BuildError

MakeCase = Callable[..., Any]


@pytest.fixture
def made(case: MakeCase) -> Any:
    return case(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))


def timed(made: Any, *times: float) -> Any:
    return attrs.evolve(made.request, latencies=lambda _engines: times)


def test_faster_engine_is_kept(made: Any) -> None:
    first, second = made.build(), made.build()
    assert faster_of("another way", first, timed(made, 1.0, 0.5), lambda: second) is second
    assert first.closed
    assert not second.closed
    assert made.attempts[-1].succeeded
    assert made.attempts[-1].detail == "0.500 ms a call, 1.000 ms without"


@pytest.mark.parametrize("after", [0.99, 1.0, 3.0])
def test_what_is_not_clearly_faster_is_not_kept(made: Any, after: float) -> None:
    first, second = made.build(), made.build()
    assert faster_of("another way", first, timed(made, 1.0, after), lambda: second) is first
    assert second.closed
    assert not first.closed
    assert not made.attempts[-1].succeeded


@pytest.mark.parametrize("error", [BuildError("no kernel"), torch.OutOfMemoryError("too large")])
def test_way_that_fails_leaves_the_engine(made: Any, error: Exception) -> None:
    first = made.build()

    def fail() -> Any:
        raise error

    assert faster_of("another way", first, made.request, fail) is first
    assert not first.closed
    assert made.attempts[-1].detail == str(error)


def test_interruption_closes_both(made: Any) -> None:
    first, second = made.build(), made.build()

    def interrupt(_engines: object) -> Any:
        raise KeyboardInterrupt

    request = attrs.evolve(made.request, latencies=interrupt)
    with pytest.raises(KeyboardInterrupt):
        faster_of("another way", first, request, lambda: second)
    assert first.closed
    assert second.closed


def test_rewritten_models_and_layouts_are_tried_one_after_the_other(
    case: MakeCase, tmp_path: Path
) -> None:
    made = case(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8))
    engine = made.build()
    rewritten = RewrittenModel(engine.model.path, engine.model.facts)
    engine.model = attrs.evolve(engine.model, rewritten=rewritten)
    tried = []

    def opened(model: Any) -> Any:
        tried.append((model.uses_rewritten, model.channels_last))
        other = made.build()
        other.model = model
        return other

    best = fastest(engine, timed(made, 1.0, 0.5), opened)
    assert tried == [(True, False), (True, True)]
    assert best.model.uses_rewritten
    assert best.model.channels_last
    steps = [attempt.step for attempt in made.attempts if not attempt.step.startswith("export")]
    assert steps == ["rewritten graph", "channels last"]
