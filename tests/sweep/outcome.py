"""What became of a family, and the comparison that decides it."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import aitune_core as ait

from .family import Call, Family, randomise

#: Allowed difference as a share of an element's size plus the root mean square of its tensor.
SHARE = 5e-5


@attrs.frozen(kw_only=True)
class FamilyOutcome:
    """One row of the table.

    Attributes:
        family: The family.
        exporter: The way of exporting that led to the engine; empty where there is none.
        worst: Largest difference from eager of any element, in every check; None where there is
            no engine.
        build_seconds: Time that building took.
        reason: Why the family stays eager; empty where it does not.
        attempts: What was tried, in words.
    """

    family: Family
    exporter: str = ""
    worst: float | None = None
    build_seconds: float = 0.0
    reason: str = ""
    attempts: tuple[str, ...] = ()


def tune_family(family: Family, patch: pytest.MonkeyPatch) -> FamilyOutcome:
    """Tune a family's module, and check unseen calls of it against eager.

    Raises:
        AssertionError: A tuned call differs from eager.
    """
    torch.manual_seed(0)
    module = randomise(family.build())
    eager = copy.deepcopy(module)
    recorded = [family.call(*sizes) for sizes in family.recorded]
    unseen = [family.call(*sizes) for sizes in family.unseen]
    model = ait.Module(
        module, strategy=ait.OneBackendStrategy("onnxruntime"), on_miss="error"
    )
    report = ait.tune(model, [((), call) for call in recorded], device="cpu", on_failure="eager")
    (graph,) = report.modules[0].graphs
    (candidate,) = graph.candidates
    attempts = tuple(
        f"{attempt.step}: {'ok' if attempt.succeeded else attempt.detail}"
        for attempt in candidate.attempts
    )
    if graph.winner is None:
        return FamilyOutcome(
            family=family,
            build_seconds=candidate.build_seconds,
            reason=candidate.error or graph.reason,
            attempts=attempts,
        )
    # From here on only an engine can answer.
    patch.setitem(module.__dict__, "forward", _no_eager)
    differences = [_difference(model, eager, call) for call in unseen]
    assert candidate.check is not None
    return FamilyOutcome(
        family=family,
        exporter=next(attempt.step for attempt in candidate.attempts if attempt.succeeded),
        worst=max(candidate.check.worst_difference, *differences),
        build_seconds=candidate.build_seconds,
        attempts=attempts,
    )


def _no_eager(*_args: object, **_kwargs: object) -> None:
    pytest.fail("the call ran eagerly")


def _difference(model: nn.Module, eager: nn.Module, call: Call) -> float:
    """Return the largest difference between the results of a call."""
    with torch.no_grad():
        expected = eager(**copy.deepcopy(call))
    got = model(**copy.deepcopy(call))
    assert type(got) is type(expected)
    wanted, structure = pytree.tree_flatten_with_path(expected)
    found, other = pytree.tree_flatten_with_path(got)
    assert other == structure
    pairs = zip(wanted, found, strict=True)
    return max(_leaf(pytree.keystr(path), one, two) for (path, one), (_, two) in pairs)


def _leaf(path: str, expected: Any, got: Any) -> float:
    """Check one leaf of a result, and return the largest difference in it."""
    if not isinstance(expected, Tensor):
        assert type(got) is type(expected), path
        assert got == expected, path
        return 0.0
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), path
    if not expected.dtype.is_floating_point:
        assert torch.equal(got, expected), path
        return 0.0
    reference = expected.double()
    difference = (got.double() - reference).abs()
    allowed = SHARE * (reference.abs() + reference.square().mean().sqrt())
    assert bool((difference <= allowed).all()), f"{path}: off by {float(difference.max()):.3g}"
    return float(difference.max())
