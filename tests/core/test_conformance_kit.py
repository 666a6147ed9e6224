"""The kit tells liars from honest backends, and says which part of the contract they break."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

import attrs
import pytest
from fakes import Fault

pytest_plugins = ["pytester"]

#: A fault, a test that it fails, and words of the contract or of what is there instead.
CAUGHT = [
    (Fault.ZEROS, "test_results_agree_with_eager[mlp]", "gives what the module gives"),
    (Fault.FLOAT64, "test_results_agree_with_eager[mlp]", "float64"),
    (Fault.SWAPPED, "test_results_agree_with_eager[several]", "in the order of graph.outputs"),
    (Fault.COUNT, "test_results_agree_with_eager[several]", "eager returns 3 tensors"),
    (Fault.SHAPE, "test_results_agree_with_eager[conv]", "shape"),
    (Fault.STALE, "test_takes_every_size_in_the_ranges[mlp]", "takes every size in the ranges"),
    (Fault.LARGEST, "test_takes_every_size_in_the_ranges[mlp]", "max"),
    (Fault.STRIDED, "test_takes_any_strides[mlp]", "any strides and storage offset"),
    (Fault.OVERWRITTEN, "test_results_stay_valid[mlp]", "results stay valid after later calls"),
    (Fault.KEPT, "test_results_stay_valid[mlp]", "writing to results changes no later result"),
    (Fault.WRITES, "test_inputs_are_left_alone[mlp]", "does not write to its inputs"),
    (Fault.GRAD, "test_results_carry_no_gradients", "results carry no gradients"),
    (Fault.BFLOAT16, "test_results_agree_with_eager[mlp]", "differs from eager"),
    (Fault.RAISES, "test_results_agree_with_eager[mlp]", "the engine broke"),
    (Fault.BUILD, "test_results_agree_with_eager[mlp]", "builds the module 'mlp' of the kit"),
    (Fault.NO_ENGINE, "test_build_is_an_engine_of_the_graph[mlp]", "build returns an Engine"),
    (Fault.OTHER_GRAPH, "test_build_is_an_engine_of_the_graph[mlp]", "of the request's graph"),
]

#: Backends that behave badly in ways that no fake does.
BAD = """
import contextlib, os, random, warnings
import torch
from fakes import AffineBackend, FakeBackend, FakeConfig, FakeEngine
from aitune_core import BuildError, Engine
from aitune_core.testing import BackendConformance

class Bad(FakeBackend):
    engine_class = FakeEngine
    def build(self, request):
        engine = super().build(request)
        engine.__class__ = self.engine_class
        return engine

class Conformance(BackendConformance):
    can_store = False

class Printing(Bad):
    def build(self, request):
        os.write(2, b"from native code")
        print("from Python")
        warnings.warn("a warning")
        return super().build(request)

class TestPrinting(Conformance):
    backend_class = Printing

class Changing(Bad):
    def build(self, request):
        torch.rand(1)
        random.random()
        torch.set_num_threads(torch.get_num_threads() % 2 + 1)
        warnings.simplefilter("ignore")
        with torch.no_grad():
            for parameter in request.module.parameters():
                parameter.add_(1)
        return super().build(request)

class TestChanging(Conformance):
    backend_class = Changing

class OneAtATime(FakeEngine):
    busy = False
    def run(self, inputs):
        if self.busy:
            raise RuntimeError("not thread-safe")
        self.busy = True
        for _ in range(20):
            result = super().run(inputs)
        self.busy = False
        return result

class TestOneAtATime(Conformance):
    backend_class = type("OneAtATimeBackend", (Bad,), {"engine_class": OneAtATime})

class Returning(FakeEngine):
    def run(self, inputs):
        (*results, _) = super().run(inputs)
        return [*results, inputs[0]]

class TestReturning(Conformance):
    backend_class = type("ReturningBackend", (Bad,), {"engine_class": Returning})

class OpenForEver(FakeEngine):
    def run(self, inputs):
        return [tensor.detach() for tensor in self.module(*inputs)]

class TestOpenForEver(Conformance):
    backend_class = type("OpenForEverBackend", (Bad,), {"engine_class": OpenForEver})

class ClosedOnce(FakeEngine):
    def close(self):
        if self.closed:
            raise RuntimeError("closed before")
        super().close()

class TestClosedOnce(Conformance):
    backend_class = type("ClosedOnceBackend", (Bad,), {"engine_class": ClosedOnce})

class TakesAnything(FakeEngine):
    def __call__(self, inputs):
        return self.run(inputs)

class TestTakesAnything(Conformance):
    backend_class = type("TakesAnythingBackend", (Bad,), {"engine_class": TakesAnything})

class AnyConfig(Bad):
    def __init__(self, config=None):
        self.config = FakeConfig() if config is None else config
        self.built, self.requests = [], []

class TestAnyConfig(Conformance):
    backend_class = AnyConfig

class Escaping(Bad):
    def build(self, request):
        with torch.no_grad():
            request.module(*request.samples[0])
        return super().build(request)

class TestEscaping(Conformance):
    backend_class = Escaping

class TestSaysItStores(BackendConformance):
    backend_class = FakeBackend

class Refusing(Bad):
    def build(self, request):
        if request.graph.mutated_inputs:
            raise BuildError("it changes its input", backend_name=self.name, step="check")
        return super().build(request)

class TestRefusing(Conformance):
    backend_class = Refusing
    refuses = {"in_place": "inputs that change"}

class TestNeedlessRefusal(Conformance):
    backend_class = FakeBackend
    refuses = {"mlp": "no reason"}
"""

BAD_CAUGHT = [
    ("TestPrinting", "test_nothing_is_printed[mlp]", "from native code"),
    ("TestPrinting", "test_nothing_is_printed[mlp]", "from Python"),
    ("TestPrinting", "test_nothing_is_printed[mlp]", "a warning"),
    ("TestChanging", "test_nothing_else_is_changed[mlp]", "random numbers of torch"),
    ("TestChanging", "test_nothing_else_is_changed[mlp]", "random numbers of Python"),
    ("TestChanging", "test_nothing_else_is_changed[mlp]", "threads of torch"),
    ("TestChanging", "test_nothing_else_is_changed[mlp]", "filters of warnings"),
    ("TestChanging", "test_nothing_else_is_changed[mlp]", "weights of the module"),
    ("TestOneAtATime", "test_calls_from_threads", "threads may call an engine at once"),
    ("TestReturning", "test_passes_the_numeric_check[aliased]", "results must be the caller's"),
    ("TestOpenForEver", "test_closing", "a closed engine cannot be called"),
    ("TestClosedOnce", "test_closing", "may be closed twice"),
    ("TestTakesAnything", "test_inputs_that_do_not_fit_are_refused", "InputMismatchError"),
    ("TestAnyConfig", "test_refuses_wrong_configurations", "of another class is refused"),
    ("TestEscaping", "test_failing_builds_are_build_errors", "into a BuildError"),
    ("TestSaysItStores", "test_a_new_process_loads_what_was_saved[mlp]", "in another process"),
    ("TestNeedlessRefusal", "test_what_it_refuses_is_refused_with_the_reason", "refuses 'mlp'"),
]


#: Writes what becomes of tests.
CONFTEST = """
import json
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        with open("reports", "a") as file:
            print(json.dumps([report.nodeid, report.outcome, report.longreprtext]), file=file)
"""


@attrs.frozen
class Report:
    """What became of a test: passed, failed or skipped, and why."""

    outcome: str
    text: str


def outcomes(
    pytester: pytest.Pytester, source: str, *wanted: tuple[str, str]
) -> dict[tuple[str, str], Report]:
    """Run a test file, or some of its tests by class and name, and return what became of each.

    In a new process: what is imported in this one for the first time would be forgotten later.
    """
    pytester.makeconftest(CONFTEST)
    file = pytester.makepyfile(source)
    ids = [f"{file}::{kind}::{name}" for kind, name in dict.fromkeys(wanted)] or [str(file)]
    pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", *ids)
    found: dict[tuple[str, str], Report] = {}
    for line in (pytester.path / "reports").read_text().splitlines():
        node, outcome, text = json.loads(line)
        _, kind, name = node.split("::")
        found[kind, name] = Report(outcome, text)
    return found


def failure(found: Mapping[tuple[str, str], Report], kind: str, name: str) -> str:
    report = found[kind, name]
    assert report.outcome == "failed"
    return report.text


@pytest.fixture(autouse=True)
def fakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def suite(*faults: Fault) -> str:
    """Return a test file with a class for each fault of the fakes."""
    classes = [
        f"class Test{fault.name}(BackendConformance):\n"
        f"    backend_class = FakeBackend\n"
        f"    options = {{'fault': {fault.value!r}}}\n"
        f"    can_store = False\n"
        for fault in faults
    ]
    head = "from fakes import FakeBackend\nfrom aitune_core.testing import BackendConformance\n"
    return head + "\n".join(classes)


def test_honest_backends_pass(pytester: pytest.Pytester) -> None:
    found = outcomes(pytester, suite(Fault.NONE, Fault.ORDER))
    assert len(found) > 140
    failed = [key for key, report in found.items() if report.outcome == "failed"]
    assert failed == []
    skipped = {name for (_, name), report in found.items() if report.outcome == "skipped"}
    assert skipped == {"test_runs_on_the_callers_stream"}


def test_liars_fail_for_the_right_reason(pytester: pytest.Pytester) -> None:
    wanted = [(f"Test{fault.name}", name) for fault, name, _ in CAUGHT]
    found = outcomes(pytester, suite(*(fault for fault, _, _ in CAUGHT)), *wanted)
    for fault, name, words in CAUGHT:
        text = failure(found, f"Test{fault.name}", name)
        assert "Contract: " in text, fault
        assert words in text, fault


def test_bad_manners_fail_for_the_right_reason(pytester: pytest.Pytester) -> None:
    found = outcomes(pytester, BAD, *((kind, name) for kind, name, _ in BAD_CAUGHT))
    for kind, name, words in BAD_CAUGHT:
        text = failure(found, kind, name)
        assert "Contract: " in text, kind
        assert words in text, kind


def test_modules_that_a_backend_refuses_are_left_out(pytester: pytest.Pytester) -> None:
    refusal = "test_what_it_refuses_is_refused_with_the_reason"
    left_out = "test_results_agree_with_eager[in_place]"
    found = outcomes(pytester, BAD, ("TestRefusing", refusal), ("TestRefusing", left_out))
    assert found["TestRefusing", refusal].outcome == "passed"
    assert found["TestRefusing", left_out].outcome == "skipped"


def test_without_a_gpu_tests_of_cuda_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = (
        "from fakes import FakeBackend\nfrom aitune_core.testing import BackendConformance\n"
        "class TestCuda(BackendConformance):\n    backend_class = FakeBackend\n"
        "    device = 'cuda'\n"
    )
    found = outcomes(pytester, source)
    assert {report.outcome for report in found.values()} == {"skipped"}
