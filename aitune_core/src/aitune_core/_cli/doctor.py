"""``aitune doctor``: what works here, what does not and why, and how to repair it."""

from __future__ import annotations

import json as json_format
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import attrs
import torch
import typer

from aitune_core._cli.errors import FAILED
from aitune_core._cli.output import print_json, print_table, print_text, state
from aitune_core._discovery import distribution_version
from aitune_core._plugins import default_registry
from aitune_core.backend import Diagnosis
from aitune_core.errors import ConfigError

__all__ = ["doctor"]

_SECONDS: Final = 180
_AT_ONCE: Final = 4
_QUERY: Final = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


@attrs.frozen
class Finding:
    """What came of trying a part of a backend."""

    backend: str
    diagnosis: Diagnosis

    @property
    def name(self) -> str:
        """``backend/part``."""
        return f"{self.backend}/{self.diagnosis.part}".rstrip("/")


def doctor(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            help="What must work: backends (onnxruntime), parts (cuda), or both (onnxruntime/cuda)."
        ),
    ] = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what works here, and how to repair what does not.

    Each backend is really tried, in a child process. The exit code is 1 where something that was
    asked for does not work; where nothing was, if a plugin is broken or a backend cannot run at
    all.

    Examples: aitune doctor | aitune doctor onnxruntime/tensorrt | aitune doctor --json
    """
    registry = default_registry()
    system = _system()
    failures = [str(failure) for failure in registry.failures]
    findings = _findings([info.name for info in registry.backend_infos()], wanted or [])
    broken = _broken(findings, wanted or [], failures)
    if json:
        print_json(
            {
                "system": system,
                "plugins_not_loaded": failures,
                "backends": [
                    {"backend": one.backend, **attrs.asdict(one.diagnosis)} for one in findings
                ],
                "broken": broken,
            }
        )
    else:
        _show(system, findings, failures, broken)
    if broken:
        raise typer.Exit(FAILED)


def _findings(names: list[str], wanted: list[str]) -> list[Finding]:
    """Try backends, each in a process; only those that are asked for, where that is known."""
    asked = [name.partition("/")[0] for name in wanted]
    if asked and all(name in names for name in asked):
        names = [name for name in names if name in asked]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        tried = list(pool.map(_tried, names))
    return [
        Finding(name, diagnosis)
        for name, diagnoses in zip(names, tried, strict=True)
        for diagnosis in diagnoses
    ]


def _broken(findings: list[Finding], wanted: list[str], failures: list[str]) -> list[str]:
    """Return what was asked for and does not work."""
    if not wanted:
        names = dict.fromkeys(one.backend for one in findings)
        return [*failures, *(name for name in names if not _works(name, findings))]
    known = sorted({name for one in findings for name in _names(one)})
    for name in wanted:
        if name not in known:
            msg = f"aitune doctor knows no {name!r}; it knows: {', '.join(known)}"
            raise ConfigError(msg, field="wanted", value=name, allowed=known)
    return [name for name in wanted if not _works(name, findings)]


def _names(finding: Finding) -> set[str]:
    return {finding.backend, finding.diagnosis.part, finding.name} - {""}


def _works(name: str, findings: list[Finding]) -> bool:
    """Whether what has a name works: any part of a backend, and all parts of another name."""
    meant = [one for one in findings if name in _names(one)]
    of_backend = any(one.backend == name for one in meant)
    return (any if of_backend else all)(one.diagnosis.available for one in meant)


def _tried(name: str) -> list[Diagnosis]:
    """Try a backend in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "aitune_core._cli.probe", name, str(file)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            result = subprocess.run(  # noqa: S603 - this Python, the core's own module
                command,
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                env=env,
            )
        except subprocess.TimeoutExpired:
            reason = f"trying it took longer than {_SECONDS} seconds"
            return [Diagnosis(part="", available=False, reason=reason)]
        if result.returncode == 0 and file.is_file():
            return [Diagnosis(**found) for found in json_format.loads(file.read_text())]
    last = result.stderr.strip().splitlines()[-1:]
    reason = ": ".join(["trying it ends its process " + _ending(result.returncode), *last])
    return [Diagnosis(part="", available=False, reason=reason)]


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _system() -> dict[str, Any]:
    gpus, problem = _gpus()
    return {
        "aitune-core": distribution_version("aitune-core"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        "gpus": gpus,
        "cuda_problem": problem,
    }


def _cudnn() -> str | None:
    version = torch.backends.cudnn.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
    return None if version is None else str(version)


def _gpus() -> tuple[list[str], str | None]:
    """Return the GPUs that the driver tells of, and why PyTorch cannot use them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], None
    result = subprocess.run(  # noqa: S603 - the driver's tool
        [tool, *_QUERY], check=False, capture_output=True, text=True
    )
    if result.returncode != 0:
        return [], f"nvidia-smi fails: {(result.stdout + result.stderr).strip()[:200]}"
    gpus = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    if gpus and torch.version.cuda is None:
        return gpus, "there is a GPU, and PyTorch is built without CUDA; install one that is"
    if gpus and not torch.cuda.is_available():
        msg = f"PyTorch is built for CUDA {torch.version.cuda} and sees no GPU; update the driver"
        return gpus, msg
    return gpus, None


def _show(
    system: dict[str, Any], findings: list[Finding], failures: list[str], broken: list[str]
) -> None:
    rows = [
        ("aitune-core", system["aitune-core"]),
        ("Python", system["python"]),
        ("platform", system["platform"]),
        ("PyTorch", f"{system['torch']}, CUDA: {system['torch_cuda'] or 'none'}"),
        ("cuDNN", system["cudnn"] or "none"),
        ("GPUs", "\n".join(system["gpus"]) or "none"),
    ]
    if system["cuda_problem"]:
        rows.append(("problem", system["cuda_problem"]))
    print_table("System", ("what", "found"), rows)
    print_text("")
    print_table(
        "Backends",
        ("what", "works", "because"),
        [
            (one.name, state(good=one.diagnosis.available), _because(one.diagnosis))
            for one in findings
        ],
    )
    for failure in failures:
        print_text(f"\nnot loaded: {failure}")
    print_text(
        f"\nBroken: {', '.join(broken)}" if broken else "\nNothing that was asked for is broken."
    )


def _because(diagnosis: Diagnosis) -> str:
    repair = f"\nrepair: {diagnosis.repair}" if diagnosis.repair else ""
    return f"{diagnosis.reason}{repair}"
