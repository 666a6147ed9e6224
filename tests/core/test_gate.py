"""Liars that a tuning rejects, and right engines that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_plugin import empty_registry
from fakes import FakeBackend, Fault
from samples import Function
from torch import Tensor, nn

from aitune_core import (
    BatchDim,
    CheckResult,
    ConfigError,
    FirstWinsStrategy,
    Module,
    OneBackendStrategy,
    TuneReport,
    TuningError,
    ValidationError,
    tune,
)
from aitune_core._reference import Reference


class Heads(nn.Module):
    """Two outputs of one shape, of one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 96)
        self.first = nn.Linear(96, 5)
        self.second = nn.Linear(96, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x).relu()
        return {"first": self.first(hidden), "second": self.second(hidden)}


def tuned(fault: Fault, module: nn.Module, data: Any, **options: Any) -> TuneReport:
    shapes = options.pop("dynamic_shapes", None)
    model = Module(
        module.eval(), dynamic_shapes=shapes, strategy=OneBackendStrategy(FakeBackend(fault=fault))
    )
    return tune(model, data, device="cpu", registry=empty_registry(), **options)


def check_of(report: TuneReport) -> CheckResult:
    check = report.modules[0].graphs[0].candidates[0].check
    assert check is not None
    return check


def rejection(fault: Fault, module: nn.Module, data: Any, **options: Any) -> ValidationError:
    with pytest.raises(TuningError) as caught:
        tuned(fault, module, data, **options)
    (error,) = caught.value.exceptions
    assert isinstance(error, ValidationError)
    return error


@pytest.mark.parametrize(
    ("fault", "kind", "case"),
    [
        (Fault.ZEROS, "values", "recorded call 0"),
        (Fault.FLOAT64, "dtype", "recorded call 0"),
        (Fault.SWAPPED, "values", "recorded call 0"),
        (Fault.STALE, "values", "rows in another order"),
        (Fault.LARGEST, "values", "maximum sizes (batch=8)"),
        (Fault.STRIDED, "values", "strided inputs"),
        (Fault.OVERWRITTEN, "overwritten", "recorded call 0"),
        (Fault.KEPT, "aliasing", "recorded call 0"),
        (Fault.ONE_ELEMENT, "values", "recorded call 0"),
        (Fault.BFLOAT16, "values", "recorded call 0"),
    ],
)
def test_liars_are_rejected(fault: Fault, kind: str, case: str) -> None:
    shapes = {"x": {0: BatchDim(1, 8)}}
    error = rejection(fault, Heads(), torch.randn(3, 64), dynamic_shapes=shapes)
    assert (error.kind, error.case) == (kind, case)


def test_stale_result_of_one_recorded_call_of_integers_is_rejected() -> None:
    """No other values are made of integers than those of other rows."""
    embed = nn.Sequential(nn.Embedding(9, 4))
    error = rejection(Fault.STALE, embed, torch.tensor([[1, 2], [3, 4]]))
    assert (error.kind, error.case) == ("values", "rows in another order")


def test_result_that_is_an_input_is_rejected() -> None:
    error = rejection(Fault.INPUT, Function(lambda x: x * 1), torch.ones(2))
    assert (error.kind, error.output) == ("aliasing", "out")


def test_other_order_of_summation_passes() -> None:
    check = check_of(tuned(Fault.ORDER, Heads(), torch.randn(3, 64)))
    assert check.worst_difference > 0.0
    assert 0.0 < check.tolerance_share < 0.5
    assert check.reference == "float64"
    assert 0.0 < check.eager_error < 1e-6
    assert 0.0 < check.error < 1e-6


def test_eagers_own_bits_pass_whatever_is_allowed() -> None:
    check = check_of(tuned(Fault.NONE, Heads(), torch.randn(3, 64), tolerance=0.0))
    assert (check.worst_difference, check.tolerance_share) == (0.0, 0.0)
    assert check.error == pytest.approx(check.eager_error, rel=0.05)


@pytest.mark.parametrize("tolerance", [1e-9, {"out['first']": 1e-9}])
def test_less_may_be_allowed_than_what_is_derived(tolerance: Any) -> None:
    error = rejection(Fault.ORDER, Heads(), torch.randn(3, 64), tolerance=tolerance)
    assert (error.kind, error.output) == ("values", "out['first']")


@pytest.mark.parametrize("tolerance", [0.1, {"out['first']": 0.1}])
def test_more_may_be_allowed_than_what_is_derived(tolerance: Any) -> None:
    check = check_of(tuned(Fault.ONE_ELEMENT, Heads(), torch.randn(3, 64), tolerance=tolerance))
    assert check.worst_output == "out['first']"
    assert check.worst_index == (2, 4)
    assert 0.0 < check.tolerance_share < 1.0


def test_what_is_allowed_for_another_output_counts_for_that_one_alone() -> None:
    tolerance = {"out['second']": 0.1}
    error = rejection(Fault.ONE_ELEMENT, Heads(), torch.randn(3, 64), tolerance=tolerance)
    assert error.output == "out['first']"


@pytest.mark.parametrize(
    "tolerance",
    [-1e-3, float("nan"), float("inf"), True, "tight", {"out": -1.0}, {"out": None}, {0: 1e-3}],
)
def test_tolerance_that_is_no_error_is_refused_before_anything_runs(tolerance: Any) -> None:
    ran: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        ran.append(x)
        return x * 2

    with pytest.raises(ConfigError) as caught:
        tuned(Fault.NONE, Function(forward), torch.ones(2), tolerance=tolerance)
    assert (caught.value.field or "").startswith("tolerance")
    assert not ran


def test_tolerance_for_an_unknown_output_lists_the_outputs() -> None:
    with pytest.raises(ConfigError, match=r"out\['first'\], out\['second'\]") as caught:
        tuned(Fault.NONE, Heads(), torch.randn(3, 64), tolerance={"logits": 1e-3})
    assert caught.value.value == "logits"
    assert caught.value.allowed == ["out['first']", "out['second']"]


def test_reference_is_computed_once_for_all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    plain = Reference._corrected

    def counted(self: Reference, cases: Any) -> Any:
        computed.append(len(cases))
        return plain(self, cases)

    monkeypatch.setattr(Reference, "_corrected", counted)
    strategy = FirstWinsStrategy([FakeBackend(fault=Fault.ZEROS), FakeBackend()])
    model = Module(Heads().eval(), strategy=strategy)
    report = tune(
        model, torch.randn(3, 64), device="cpu", on_failure="eager", registry=empty_registry()
    )
    assert len(report.modules[0].graphs[0].candidates) == 2
    assert len(computed) == 1
