"""What became of a family, and the comparison with eager that decides it."""

from __future__ import annotations

import copy
from typing import Any, Final

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import aitune_core as ait

from .family import Call, Family, randomise

#: Allowed difference as a share of an element's size plus the root mean square of its tensor: half
#: of what tuning allows.
SHARE: Final = 5e-5


@attrs.frozen(kw_only=True)
class Outcome:
    """One row of the table.

    Attributes:
        family: The family.
        exporter: The way of exporting that led to the engine; empty where there is none.
        taken: How many of the unseen calls the engine took.
        worst: Largest difference from eager of any element in any check; None without engine.
        build_seconds: Time that building took, all attempts together.
        conditions: What else sizes must meet, apart from being in their ranges.
        reason: Why the family stays eager; empty where it does not.
        failure: What is wrong with its engine; empty where nothing is.
        attempts: What was tried and failed, in words.
    """

    family: Family
    exporter: str = ""
    taken: int = 0
    worst: float | None = None
    build_seconds: float = 0.0
    conditions: tuple[str, ...] = ()
    reason: str = ""
    failure: str = ""
    attempts: tuple[str, ...] = ()

    @property
    def result(self) -> str:
        """What serves the family's calls, in a word or two."""
        if self.failure:
            return "wrong"
        if self.reason:
            return "eager"
        return "engine" if self.taken == len(self.family.unseen) else "some sizes"


def sweep(family: Family, patch: pytest.MonkeyPatch) -> Outcome:
    """Tune a family's module and compare unseen calls of it with eager."""
    torch.manual_seed(0)
    module = randomise(family.build())
    eager = copy.deepcopy(module)
    recorded = [((), family.call(*sizes)) for sizes in family.recorded]
    unseen = [(sizes, family.call(*sizes)) for sizes in family.unseen]
    model = ait.Module(module, strategy=ait.OneBackendStrategy("onnxruntime"), on_miss="error")
    try:
        report = ait.tune(model, recorded, device="cpu", on_failure="eager")
    except ait.AituneError as error:
        return Outcome(family=family, reason=str(error))
    outcome = _outcome_of(family, report)
    if outcome.reason:
        return outcome
    assert outcome.worst is not None
    # From here on only an engine can answer.
    patch.setitem(module.__dict__, "forward", _no_eager)
    worst = outcome.worst
    taken = 0
    for sizes, call in unseen:
        try:
            worst = max(worst, _difference(model, eager, call))
            taken += 1
        except ait.InputMismatchError as error:
            if error.expected not in outcome.conditions:
                return attrs.evolve(outcome, failure=f"sizes {sizes}: {error}")
        except (AssertionError, ait.AituneError) as error:
            failure = f"sizes {sizes}: {type(error).__name__}: {error}"
            return attrs.evolve(outcome, failure=failure)
    failure = "" if taken else f"no call of {family.unseen} is one of its sizes"
    return attrs.evolve(outcome, worst=worst, taken=taken, failure=failure)


def _outcome_of(family: Family, report: ait.TuneReport) -> Outcome:
    (module,) = report.modules
    if not module.graphs:
        return Outcome(family=family, reason="; ".join(module.notes))
    (graph,) = module.graphs
    if not graph.candidates:
        return Outcome(family=family, reason=graph.reason)
    (candidate,) = graph.candidates
    done = [
        attempt.step.removeprefix("export with ")
        for attempt in candidate.attempts
        if attempt.succeeded and attempt.step.startswith("export with ")
    ]
    return Outcome(
        family=family,
        exporter=done[0] if done else "",
        worst=None if candidate.check is None else candidate.check.worst_difference,
        build_seconds=candidate.seconds.build,
        conditions=graph.conditions,
        reason=(candidate.error or graph.reason) if graph.winner is None else "",
        attempts=tuple(
            f"{attempt.step}: {attempt.detail}"
            for attempt in candidate.attempts
            if not attempt.succeeded
        ),
    )


def _no_eager(*_args: object, **_kwargs: object) -> None:
    msg = "the call ran eagerly"
    raise AssertionError(msg)


def _difference(model: nn.Module, eager: nn.Module, call: Call) -> float:
    """Return the largest difference between the results of a call, structure included."""
    with torch.no_grad():
        expected = eager(**copy.deepcopy(call))
    got = model(**copy.deepcopy(call))
    assert type(got) is type(expected)
    wanted, structure = pytree.tree_flatten_with_path(expected)
    found, structure_found = pytree.tree_flatten_with_path(got)
    assert structure_found == structure
    return max(
        _leaf_difference(pytree.keystr(path), one, other)
        for (path, one), (_, other) in zip(wanted, found, strict=True)
    )


def _leaf_difference(path: str, expected: Any, got: Any) -> float:
    """Check one leaf of a result, and return the largest difference in it."""
    if not isinstance(expected, Tensor):
        assert type(got) is type(expected), path
        assert got == expected, path
        return 0.0
    assert isinstance(got, Tensor), path
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), path
    if not expected.dtype.is_floating_point:
        assert torch.equal(got, expected), path
        return 0.0
    reference = expected.double()
    difference = (got.double() - reference).abs()
    allowed = SHARE * (reference.abs() + reference.square().mean().sqrt())
    assert bool((difference <= allowed).all()), f"{path} is off by {float(difference.max()):.3g}"
    return float(difference.max())
