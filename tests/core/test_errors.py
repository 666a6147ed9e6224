from __future__ import annotations

import pickle
from typing import Any

import pytest

import aitune_core as ait
from aitune_core import errors

FACTS: dict[type[Exception], dict[str, Any]] = {
    errors.AituneError: {},
    errors.ConfigError: {"field": "opset", "value": 3, "allowed": (18, 23)},
    errors.PluginError: {"plugin": "p", "distribution": "d"},
    errors.PluginLoadError: {"plugin": "p", "distribution": "d"},
    errors.PluginConflictError: {"plugin": "p", "distribution": "d", "distributions": ("a", "b")},
    errors.UnknownBackendError: {
        "plugin": "p",
        "distribution": "d",
        "known": ("x",),
        "failures": ("f",),
    },
    errors.UnknownStrategyError: {
        "plugin": "p",
        "distribution": "d",
        "known": ("x",),
        "failures": ("f",),
    },
    errors.BackendError: {"backend_name": "b"},
    errors.BackendUnavailableError: {"backend_name": "b", "missing": "m", "install_hint": "pip"},
    errors.BuildError: {"backend_name": "b", "step": "export"},
    errors.EngineClosedError: {"backend_name": "b", "operation": "run"},
    errors.CandidateRejectedError: {
        "backend_name": "b",
        "rule": "max_memory_bytes",
        "limit": 1,
        "got": 2,
    },
    errors.ValidationError: {
        "output": "out[0]",
        "kind": "values",
        "index": (0, 1),
        "worst_difference": 0.5,
        "expected": 1.0,
        "got": 1.5,
        "case": "recorded call 0",
    },
    errors.InputMismatchError: {"path": "x", "expected": 1, "got": 2},
    errors.CallFormError: {"path": "x", "expected": 1, "got": 2},
    errors.RecordingError: {"module_name": "net", "path": "x"},
    errors.CheckpointError: {"path": "m.ait", "expected": 1, "got": 2},
    errors.CheckpointFormatError: {"path": "m.ait", "expected": 1, "got": 2},
    errors.CheckpointIntegrityError: {"path": "m.ait", "expected": 1, "got": 2},
    errors.ReportError: {"path": "r.html", "expected": 1, "got": 2},
    errors.MissingExtraError: {"extra": "report", "missing": "altair", "install_hint": "pip"},
}
CLASSES = [
    kind
    for name in errors.__all__
    if issubclass(kind := getattr(errors, name), Exception)
    and not issubclass(kind, Warning | ExceptionGroup)
]


def test_every_error_class_has_facts_in_this_test() -> None:
    assert set(CLASSES) == set(FACTS)


@pytest.mark.parametrize("kind", CLASSES)
def test_error_keeps_message_and_facts_through_pickle(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("what happened", **FACTS[kind])))
    assert type(error) is kind
    assert str(error) == "what happened"
    assert {name: getattr(error, name) for name in FACTS[kind]} == FACTS[kind]


@pytest.mark.parametrize("kind", CLASSES)
def test_facts_may_be_left_out(kind: type[Exception]) -> None:
    error = kind("what happened")
    assert str(error) == "what happened"
    assert all(getattr(error, name) in (None, ()) for name in FACTS[kind])


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.ConfigError, ValueError),
        (errors.UnknownBackendError, LookupError),
        (errors.UnknownBackendError, errors.PluginError),
        (errors.UnknownStrategyError, LookupError),
        (errors.PluginLoadError, errors.PluginError),
        (errors.PluginConflictError, errors.PluginError),
        (errors.BackendUnavailableError, errors.BackendError),
        (errors.BuildError, errors.BackendError),
        (errors.EngineClosedError, errors.BackendError),
        (errors.EngineClosedError, RuntimeError),
        (errors.InputMismatchError, ValueError),
        (errors.CallFormError, TypeError),
        (errors.CallFormError, ValueError),
        (errors.CallFormError, errors.InputMismatchError),
        (errors.CheckpointFormatError, errors.CheckpointError),
        (errors.CheckpointIntegrityError, errors.CheckpointError),
        (errors.TuningError, ExceptionGroup),
        (errors.MissWarning, errors.AituneWarning),
        (errors.PluginLoadWarning, errors.AituneWarning),
        (errors.AituneWarning, UserWarning),
    ],
)
def test_error_is_also_what_a_caller_would_guess(kind: type, base: type) -> None:
    assert issubclass(kind, base)


@pytest.mark.parametrize("kind", [*CLASSES, errors.TuningError])
def test_every_error_is_an_aitune_error_and_public(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.AituneError)
    assert getattr(ait, kind.__name__) is kind


def test_tuning_error_splits_into_tuning_errors() -> None:
    build, check = errors.BuildError("b", step="export"), errors.ValidationError("v", kind="values")
    group = errors.TuningError("2 of 2 failed", [build, check])
    matching, rest = group.split(errors.BuildError)
    assert type(matching) is errors.TuningError
    assert type(rest) is errors.TuningError
    assert matching.exceptions == (build,)
    assert rest.exceptions == (check,)
    assert matching.message == rest.message == "2 of 2 failed"


def test_tuning_error_works_with_except_star() -> None:
    error = errors.TuningError("failed", [errors.BuildError("b", step="session")])
    caught: list[Exception] = []
    try:
        raise error
    except* errors.BuildError as group:
        caught.extend(each for each in group.exceptions if isinstance(each, errors.BuildError))
    assert [getattr(each, "step", None) for each in caught] == ["session"]


def test_tuning_error_keeps_its_errors_through_pickle() -> None:
    group = errors.TuningError("failed", [errors.BuildError("b", backend_name="x", step="export")])
    copy = pickle.loads(pickle.dumps(group))
    assert type(copy) is errors.TuningError
    assert copy.message == "failed"
    (error,) = copy.exceptions
    assert isinstance(error, errors.BuildError)
    assert (error.backend_name, error.step) == ("x", "export")
