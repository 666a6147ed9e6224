"""The page about writing a backend, followed from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from samples import mlp

import aitune_core as ait

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"
FILE = re.compile(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\w+$", re.MULTILINE)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for name, content in FILE.findall(PAGE.read_text()):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path


def test_every_block_of_the_page_is_a_file_and_they_are_short() -> None:
    text = PAGE.read_text()
    files = FILE.findall(text)
    assert len(files) == len(BLOCK.findall(text)) == 4
    lines = [line for _, content in files for line in content.splitlines() if line.strip()]
    assert len(lines) < 100
    for name, content in files:
        if name.endswith(".py"):
            compile(content, name, "exec")


def test_the_backend_of_the_page_passes_the_kit(project: Path) -> None:
    search = [str(project / "src"), *filter(None, sys.path)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed.group(1)) > 70


def test_the_backend_of_the_page_is_found_and_used_by_name(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(project / "src")
    facts = tomllib.loads((project / "pyproject.toml").read_text())
    ((name, value),) = facts["project"]["entry-points"]["aitune"].items()
    registry = ait.PluginRegistry([metadata.EntryPoint(name, value, "aitune")])
    assert registry.failures == []
    model = ait.Module(mlp(), strategy=ait.OneBackendStrategy((name, {"strict": False})))
    report = ait.tune(
        model, [torch.randn(2, 4), torch.randn(5, 4)], device="cpu", registry=registry
    )
    assert report.modules[0].graphs[0].winner == "exported"
    for loaded in [
        module for module in sys.modules if module.startswith("aitune_backend_exported")
    ]:
        monkeypatch.delitem(sys.modules, loaded)
