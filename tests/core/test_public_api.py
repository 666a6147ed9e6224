from __future__ import annotations

import inspect
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import aitune_core as ait

if TYPE_CHECKING:
    from pathlib import Path

PUBLIC = [
    "AituneError",
    "AituneWarning",
    "ArtifactReader",
    "ArtifactWriter",
    "Attempt",
    "Backend",
    "BackendConfig",
    "BackendError",
    "BackendInfo",
    "BackendReference",
    "BackendUnavailableError",
    "BatchDim",
    "BatchPoint",
    "BuildError",
    "BuildRequest",
    "CallFormError",
    "CandidateRejectedError",
    "CheckResult",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointIntegrityError",
    "ConfigError",
    "Decision",
    "Diagnosis",
    "DynamicDim",
    "Engine",
    "EngineClosedError",
    "EngineTable",
    "FirstWinsStrategy",
    "GraphSpec",
    "InputMismatchError",
    "LatencyBudgetStrategy",
    "Limits",
    "MaxThroughputStrategy",
    "Measurement",
    "MinLatencyStrategy",
    "MissWarning",
    "MissingExtraError",
    "Module",
    "OneBackendStrategy",
    "Outcome",
    "PerGraphStrategy",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "PluginLoadWarning",
    "PluginRegistry",
    "Ratio",
    "RecordingError",
    "ReportError",
    "SizeCondition",
    "StepSeconds",
    "Strategy",
    "StrategyInfo",
    "StrategyReference",
    "TensorSpec",
    "Trial",
    "TuneReport",
    "TuningError",
    "UnknownBackendError",
    "UnknownStrategyError",
    "ValidationError",
    "available_backends",
    "backend",
    "hookimpl",
    "load",
    "save",
    "strategy",
    "tune",
]
POSITIONAL, KEYWORD, OPTIONS = "positional", "keyword", "options"
SIGNATURES: dict[str, dict[str, Any]] = {
    "tune": {
        "func": (POSITIONAL, inspect.Parameter.empty),
        "input_data": (POSITIONAL, inspect.Parameter.empty),
        "strategy": (KEYWORD, None),
        "device": (KEYWORD, None),
        "batch_sizes": (KEYWORD, None),
        "max_calls": (KEYWORD, None),
        "dry_run": (KEYWORD, False),
        "reuse_builds": (KEYWORD, True),
        "on_failure": (KEYWORD, "raise"),
        "tolerance": (KEYWORD, None),
        "registry": (KEYWORD, None),
    },
    "save": {
        "model": (POSITIONAL, inspect.Parameter.empty),
        "path": (POSITIONAL, inspect.Parameter.empty),
        "registry": (KEYWORD, None),
    },
    "load": {
        "path": (POSITIONAL, inspect.Parameter.empty),
        "module": (KEYWORD, None),
        "device": (KEYWORD, None),
        "on_miss": (KEYWORD, "eager"),
        "registry": (KEYWORD, None),
    },
    "Module.__init__": {
        "self": (POSITIONAL, inspect.Parameter.empty),
        "module": (POSITIONAL, inspect.Parameter.empty),
        "name": (POSITIONAL, None),
        "strategy": (KEYWORD, None),
        "dynamic_shapes": (KEYWORD, None),
        "on_miss": (KEYWORD, "eager"),
        "after_tune": (KEYWORD, "keep"),
    },
    "OneBackendStrategy.__init__": {
        "self": (POSITIONAL, inspect.Parameter.empty),
        "backend": (POSITIONAL, inspect.Parameter.empty),
        "limits": (OPTIONS, inspect.Parameter.empty),
    },
    "FirstWinsStrategy.__init__": {
        "self": (POSITIONAL, inspect.Parameter.empty),
        "backends": (POSITIONAL, None),
        "allow_slower": (KEYWORD, False),
        "limits": (OPTIONS, inspect.Parameter.empty),
    },
    "MinLatencyStrategy.__init__": {
        "self": (POSITIONAL, inspect.Parameter.empty),
        "backends": (POSITIONAL, None),
        "allow_slower": (KEYWORD, False),
        "limits": (OPTIONS, inspect.Parameter.empty),
    },
    "MaxThroughputStrategy.__init__": {
        "self": (POSITIONAL, inspect.Parameter.empty),
        "backends": (POSITIONAL, None),
        "allow_slower": (KEYWORD, False),
        "limits": (OPTIONS, inspect.Parameter.empty),
    },
    "LatencyBudgetStrategy.__init__": {
        "self": (POSITIONAL, inspect.Parameter.empty),
        "latency_budget_ms": (POSITIONAL, inspect.Parameter.empty),
        "backends": (POSITIONAL, None),
        "percentile": (KEYWORD, 99),
        "limits": (OPTIONS, inspect.Parameter.empty),
    },
    "PerGraphStrategy.__init__": {
        "self": (POSITIONAL, inspect.Parameter.empty),
        "choose": (POSITIONAL, inspect.Parameter.empty),
    },
}
FORBIDDEN = {
    "onnx",
    "onnxruntime",
    "tensorrt",
    "onnxscript",
    "cattrs",
    "rich",
    "altair",
    "jinja2",
    "vl_convert",
}


def test_public_names_are_frozen() -> None:
    assert sorted(ait.__all__) == PUBLIC
    assert dir(ait) == PUBLIC


def test_every_public_name_exists_and_is_documented() -> None:
    for name in PUBLIC:
        value = getattr(ait, name)
        assert name == "hookimpl" or inspect.getdoc(value), name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        ait.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_frozen(name: str) -> None:
    value: Any = ait
    for part in name.split("."):
        value = getattr(value, part)
    kinds: dict[object, str] = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY: KEYWORD,
        inspect.Parameter.VAR_KEYWORD: OPTIONS,
    }
    found = {
        parameter.name: (kinds[parameter.kind], parameter.default)
        for parameter in inspect.signature(value).parameters.values()
    }
    assert found == SIGNATURES[name]


@pytest.mark.parametrize(
    ("kind", "abstract"),
    [
        (ait.Backend, {"check_available", "build", "load"}),
        (ait.Engine, {"run", "save", "release"}),
        (ait.Strategy, {"decide"}),
        (ait.Trial, {"build", "compare", "eager", "measure", "skip", "sweep"}),
    ],
)
def test_what_authors_must_write_is_frozen(kind: Any, abstract: set[str]) -> None:
    assert kind.__abstractmethods__ == abstract


def python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stderr == ""
    return result.stdout.strip()


@pytest.mark.parametrize("use", ["", "ait.Module(torch.nn.Linear(1, 1))(torch.ones(1))"])
def test_importing_loads_no_runtime_and_leaves_cuda_alone(use: str) -> None:
    code = (
        f"import sys, torch; before = set(sys.modules); import aitune_core as ait; {use}\n"
        f"print(sorted({FORBIDDEN!r} & (set(sys.modules) - before)))\n"
        "print(torch.cuda.is_initialized())"
    )
    assert python(code).splitlines() == ["[]", "False"]


@pytest.mark.alone
def test_importing_adds_little_to_importing_torch(tmp_path: Path) -> None:
    # Installers compile a package's bytecode once, so the compiling is not part of importing it.
    code = (
        "import sys, time, torch\n"
        f"sys.pycache_prefix, sys.dont_write_bytecode = {str(tmp_path)!r}, False\n"
        "start = time.process_time()\nimport aitune_core\nprint(time.process_time() - start)"
    )
    python(code)
    assert list(tmp_path.rglob("aitune_core/_module.*.pyc"))
    # The best of five processes, since other work on the machine slows some down.
    assert any(float(python(code)) < 0.060 for _ in range(5))


def test_importing_reads_no_plugins_and_writes_nothing() -> None:
    code = (
        "import torch\nfrom importlib import metadata\n"
        "def fail(**_): raise SystemExit('plugins were looked up')\n"
        "metadata.entry_points = fail\n"
        "import aitune_core; from aitune_core import tune, save, load; print('ok')"
    )
    assert python(code) == "ok"
