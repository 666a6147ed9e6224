"""The command, in this process and as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import aitune_core as ait
from aitune_core._cli.app import app
from aitune_core._plugins import default_registry

TESTS = str(Path(__file__).parent)
MODELS = """
import torch
from samples import Affine
def make():
    return Affine()
def calls():
    return [torch.randn(2, 4), torch.randn(5, 4)]
def number():
    return 3
def broken():
    raise ZeroDivisionError("of the user")
not_callable = 1
"""
#: A plugin with a backend that crashes when it is tried, and one that is honest.
PLUGIN = """
import os
from aitune_core import BackendReference, hookimpl
from fakes import AffineBackend
AITUNE_API_VERSION = 1
class Crashing(AffineBackend):
    name = "crashing"
    def diagnose(self):
        os.abort()
@hookimpl
def aitune_register_backends():
    return [
        BackendReference("affine", "fakes:AffineBackend", "Weighted sums."),
        BackendReference("crashing", "plugin_of_cli:Crashing", "Crashes."),
    ]
"""

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Run a command in a folder with models, with the built-in backends alone."""
    monkeypatch.setenv("AITUNE_DISABLE_PLUGINS", "all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models_of_cli.py").write_text(MODELS)
    default_registry().refresh()
    yield lambda *arguments: CliRunner().invoke(app, list(arguments))
    monkeypatch.undo()
    for name in ("models_of_cli", "plugin_of_cli"):
        sys.modules.pop(name, None)
    default_registry().refresh()


@pytest.fixture
def with_plugin(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command with a plugin that is installed in a folder."""
    others = {entry.name for entry in metadata.entry_points(group="aitune")}
    monkeypatch.setenv("AITUNE_DISABLE_PLUGINS", ",".join(others))
    folder = tmp_path / "aitune_of_cli-4.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: aitune-of-cli\nVersion: 4.2\n")
    (folder / "entry_points.txt").write_text("[aitune]\nof_cli = plugin_of_cli\n")
    (tmp_path / "plugin_of_cli.py").write_text(PLUGIN)
    default_registry().refresh()
    return run


def process(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "AITUNE_DISABLE_PLUGINS": "all",
        "PYTHONPATH": os.pathsep.join([TESTS, *filter(None, sys.path)]),
    }
    return subprocess.run(
        [sys.executable, "-m", "aitune_core", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        **settings,
    )


def test_help_names_every_command_and_the_exit_codes(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in ("doctor", "backends", "strategies", "tune", "bench", "Exit codes"):
        assert name in result.output


@pytest.mark.parametrize("name", ["doctor", "backends", "strategies", "tune", "bench"])
def test_help_of_each_command_has_an_example(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"aitune {name}" in result.output


def test_backends_are_listed_with_options_and_defaults(with_plugin: Run) -> None:
    result = with_plugin("backends", "--json")
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert set(rows) == {"affine", "crashing", "eager", "inductor"}
    assert (rows["affine"]["distribution"], rows["affine"]["version"]) == ("aitune-of-cli", "4.2")
    assert rows["inductor"]["options"] == [
        {"name": "mode", "type": "str", "default": "'default'"},
        {"name": "options", "type": "Mapping[str, Any]", "default": "{}"},
    ]
    assert "Weighted sums." in with_plugin("backends").output


def test_strategies_are_listed_with_options(run: Run) -> None:
    rows = {row["name"]: row for row in json.loads(run("strategies", "--json").output)}
    assert "min_latency" in rows
    assert rows["latency_budget"]["options"][0]["name"] == "latency_budget_ms"
    assert rows["latency_budget"]["options"][0]["default"] == ""
    assert rows["first_wins"]["options"][1]["default"] == "False"
    assert "one_backend" in run("strategies").output


def test_plugins_that_cannot_be_loaded_are_named(with_plugin: Run, tmp_path: Path) -> None:
    (tmp_path / "plugin_of_cli.py").write_text("AITUNE_API_VERSION = 9")
    sys.modules.pop("plugin_of_cli", None)
    with pytest.warns(ait.PluginLoadWarning):
        default_registry().refresh()
    result = with_plugin("backends")
    assert result.exit_code == 0
    assert "not loaded: plugin 'of_cli' of aitune-of-cli 4.2" in result.stderr


def test_doctor_says_what_works_and_what_crashes(with_plugin: Run) -> None:
    result = with_plugin("doctor", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    found = {(each["backend"], each["part"]): each for each in report["backends"]}
    assert found["eager", "cpu"]["available"]
    assert found["affine", "cpu"]["available"]
    assert "SIGABRT" in found["crashing", ""]["reason"]
    assert report["broken"] == ["crashing"]
    assert report["system"]["torch"]


def test_doctor_looks_at_what_is_asked_for(with_plugin: Run, tmp_path: Path) -> None:
    (tmp_path / "plugin_of_cli.py").write_text(
        PLUGIN.replace("os.abort()", "return [Diagnosis(part='gpu', available=False, "
        "reason='no library', repair='pip install it'), Diagnosis(part='cpu', available=True)]")
        .replace("import BackendReference", "import BackendReference, Diagnosis")
    )  # fmt: skip
    assert with_plugin("doctor", "crashing", "eager/cpu").exit_code == 0
    result = with_plugin("doctor", "crashing/gpu")
    assert result.exit_code == 1
    assert "no library" in result.output
    assert "repair: pip install it" in result.output
    assert "Broken: crashing/gpu" in result.output
    unknown = with_plugin("doctor", "nothing")
    assert unknown.exit_code == 2
    assert "knows no 'nothing'" in unknown.stderr


def test_tune_saves_and_bench_compares(with_plugin: Run, tmp_path: Path) -> None:
    arguments = ("tune", "models_of_cli:make", "--inputs", "models_of_cli:calls")
    files = ("--out", "model.ait", "--report", "report.json")
    choice = ("--strategy", "one_backend", "--backend", "affine:label=x", "--device", "cpu")
    result = with_plugin(*arguments, *choice, *files)
    assert result.exit_code == 0, result.output
    assert "saved: model.ait" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["modules"][0]["graphs"][0]["winner"] == "affine"
    bench = ("bench", "model.ait", "--inputs", "models_of_cli:calls", "--seconds", "0.1")
    timed = with_plugin(*bench, "--eager", "models_of_cli:make", "--json")
    assert timed.exit_code == 0, timed.output
    found = json.loads(timed.stdout)
    assert [row["name"] for row in found["rows"]] == ["eager", "model.ait"]
    assert found["speedup"]["low"] <= found["speedup"]["value"] <= found["speedup"]["high"]
    again = with_plugin(*bench, "--against", "model.ait")
    assert again.exit_code == 0
    assert "times as fast as model.ait" in " ".join(again.output.split())


def test_a_dry_run_saves_nothing(with_plugin: Run, tmp_path: Path) -> None:
    arguments = ("tune", "models_of_cli:make", "--inputs", "models_of_cli:calls", "--dry-run")
    result = with_plugin(*arguments, "--backend", "affine", "--out", "model.ait")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "model.ait").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("models_of_cli", "--inputs", "models_of_cli:calls"), "must be written module:name"),
        (("no_such:make", "--inputs", "models_of_cli:calls"), "there is no module 'no_such'"),
        (("models_of_cli:none", "--inputs", "models_of_cli:calls"), "has no 'none'"),
        (("models_of_cli:not_callable", "--inputs", "models_of_cli:calls"), "must be a function"),
        (("models_of_cli:number", "--inputs", "models_of_cli:calls"), "must return an nn.Module"),
        (("models_of_cli:make", "--inputs", "models_of_cli:number"), "input_data must be"),
        (("models_of_cli:make", "--inputs", "x:y", "--strategy", "fist_wins"), "'first_wins'"),
        (("models_of_cli:make", "--inputs", "x:y", "--backend", "none"), "unknown backend 'none'"),
        (("models_of_cli:make", "--inputs", "x:y", "--backend", "eager:a"), "name=value"),
        (("models_of_cli:make", "--inputs", "x:y", "--set", "wrong=1"), "wrong"),
        (("models_of_cli:make", "--inputs", "x:y", "--strategy", "one_backend"), "one --backend"),
        (("models_of_cli:make", "--inputs", "x:y", "--out", "no/where.ait"), "does not exist"),
        (("models_of_cli:make", "--inputs", "x:y", "--report", "a.docx"), ".html, .json or .txt"),
    ],
)
def test_wrong_commands_are_one_line_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], words: str
) -> None:
    result = run("tune", *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def test_bench_asks_for_something_to_compare_with(run: Run) -> None:
    result = run("bench", "model.ait", "--inputs", "models_of_cli:calls")
    assert result.exit_code == 2
    assert "--eager MODULE:FACTORY or with --against FILE" in result.stderr


def test_a_tuning_without_winner_is_exit_code_1_with_each_reason(with_plugin: Run) -> None:
    (Path.cwd() / "models_of_cli.py").write_text(MODELS.replace("Affine()", "torch.nn.ReLU()"))
    result = with_plugin(
        *("tune", "models_of_cli:make", "--inputs", "models_of_cli:calls", "--device", "cpu"),
        *("--strategy", "one_backend", "--backend", "affine"),
    )
    assert result.exit_code == 1
    assert "  - ValidationError: " in result.stderr
    assert "Traceback" not in result.output


def test_errors_of_the_user_are_named_and_debug_shows_where(run: Run) -> None:
    arguments = ("tune", "models_of_cli:broken", "--inputs", "models_of_cli:calls")
    result = run(*arguments)
    assert result.exit_code == 3
    assert "error: ZeroDivisionError: of the user; --debug shows where" in result.stderr
    assert "Traceback" not in result.output
    shown = run("--debug", *arguments)
    assert shown.exit_code == 3
    assert "Traceback" in shown.stderr
    assert "models_of_cli.py" in shown.stderr


def test_as_a_process_without_a_terminal_there_are_no_colours() -> None:
    result = process("backends")
    assert result.returncode == 0
    assert result.stderr == ""
    assert "inductor" in result.stdout
    assert "\x1b" not in result.stdout


def test_as_a_process_errors_have_exit_codes_and_no_traceback(tmp_path: Path) -> None:
    result = process("tune", "nothing:make", "--inputs", "a:b", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: MODULE:FACTORY: there is no module 'nothing'")
    assert "Traceback" not in result.stderr
    unknown = process("no-such-command")
    assert unknown.returncode == 2
    assert process("--version").stdout.startswith("aitune-core ")


def test_without_typer_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'typer' else find(name)\n"
        "from aitune_core._cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: aitune needs typer; run: python -m pip install")
    assert "Traceback" not in result.stderr
