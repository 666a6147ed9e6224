"""GPU tests skip without a CUDA device; AITUNE_REQUIRE_GPU=1 makes that a failure."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

_HERE: Final = Path(__file__).resolve().parent
_REQUIRED: Final = os.environ.get("AITUNE_REQUIRE_GPU") == "1"
_RAN: Final = pytest.StashKey[int]()


# First, so that the marker is there when -m selects.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it or give up where there is no device."""
    config.stash[_RAN] = 0
    available = torch.cuda.is_available()
    if _REQUIRED and not available:
        msg = "AITUNE_REQUIRE_GPU=1 is set, but torch sees no CUDA device"
        raise pytest.UsageError(msg)
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not available:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# The outermost wrapper, so that it sees the outcome that counts, xfail included.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count the tests of this folder whose body was run and not skipped."""
    report = yield
    if report.when == "call" and not report.skipped:
        item.config.stash[_RAN] += 1
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that was to test a GPU and tested none."""
    if _ran_nothing(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say why such a run failed."""
    if _ran_nothing(config):
        terminalreporter.write_line("AITUNE_REQUIRE_GPU=1 is set, but no GPU test ran", red=True)


def _ran_nothing(config: pytest.Config) -> bool:
    return _REQUIRED and config.stash.get(_RAN, 0) == 0


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """Return the request maker of the CPU tests."""
    path = _HERE.parent / "onnxruntime" / "conftest.py"
    spec = importlib.util.spec_from_file_location("onnxruntime_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make(cases: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a maker of cases on the GPU."""

    def build(module: nn.Module, *inputs: Tensor, **settings: Any) -> Any:
        folder = tmp_path / f"work{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        on_gpu = [tensor.cuda() for tensor in inputs]
        return cases.make_case(module.cuda(), on_gpu, folder, **settings)

    return build
