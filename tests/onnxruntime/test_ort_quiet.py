"""Exports are quiet, and leave warnings, loggers and switches of the process as they were."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aitune_core.errors import BuildError

MakeCase = Callable[..., Any]


def test_export_is_quiet_and_restores_warnings_and_loggers(
    case: MakeCase, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    level = logging.getLogger("torch.onnx").level
    filters = list(warnings.filters)
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    for use_dynamo in (True, False):
        case(module, torch.randn(5, 4)).build(use_dynamo=use_dynamo)
    assert [one for one in caplog.records if one.levelno >= logging.INFO] == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("torch.onnx").level == level
    assert list(warnings.filters) == filters


def test_first_export_of_a_process_is_quiet(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import pathlib, torch, warnings; from conftest import make_case
from aitune_core.specs import DynamicDim
axes = [{{0: DynamicDim("b", 1, 8)}}]
make_case(
    torch.nn.Linear(3, 3), [torch.randn(2, 3)], pathlib.Path({str(tmp_path)!r}),
    axes=axes, out_axes=axes,
).build()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_exports_of_several_threads_leave_the_process_as_it_was(case: MakeCase) -> None:
    level = logging.getLogger("torch.onnx").level
    filters = list(warnings.filters)
    cases = [case(nn.Linear(3, 3), torch.randn(2, 3)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        engines = list(pool.map(lambda made: made.build(), cases))
    for made, engine in zip(cases, engines, strict=True):
        made.request.check(engine)
    assert torch.backends.mha.get_fastpath_enabled()
    assert logging.getLogger("torch.onnx").level == level
    assert list(warnings.filters) == filters


def test_failing_tracer_prints_nothing(case: MakeCase, capfd: pytest.CaptureFixture[str]) -> None:
    class Close(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.isclose(x, x + 1)

    log = torch._C._jit_onnx_log
    with pytest.raises(BuildError):
        case(Close(), torch.randn(2, 3, 9, 6)).build(use_dynamo=False)
    assert capfd.readouterr() == ("", "")
    assert torch._C._jit_onnx_log is log
