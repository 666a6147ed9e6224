"""The interface between the core and its backends."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NoReturn, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from aitune_core._distributions import package_facts
from aitune_core.conditions import SizeCondition
from aitune_core.config import BackendConfig
from aitune_core.errors import (
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    EngineClosedError,
)
from aitune_core.specs import GraphSpec

__all__ = [
    "ArtifactReader",
    "ArtifactWriter",
    "Assumptions",
    "Attempt",
    "Backend",
    "BuildRequest",
    "Diagnosis",
    "Engine",
    "EngineTable",
]

#: Gives what a module takes for granted of the sizes of flat inputs.
Assumptions: TypeAlias = Callable[[Sequence[Tensor]], Sequence[SizeCondition]]


@attrs.frozen
class Attempt:
    """One way of building that a backend tried.

    Attributes:
        step: What was tried, such as ``"export with dynamo, Dim.DYNAMIC"``.
        succeeded: Whether it led on.
        detail: Why it failed, or what to know about it.
    """

    step: str
    succeeded: bool
    detail: str = ""


@attrs.frozen(kw_only=True)
class Diagnosis:
    """What came of trying a part of a backend, such as an execution provider.

    Attributes:
        part: What was tried, in short: ``"cuda"``, ``"tensorrt"``, ``"packages"``.
        available: Whether it works here.
        reason: Why it does not; what to know about it where it does.
        repair: A command or step that repairs it; empty where none is known or needed.
    """

    part: str
    available: bool
    reason: str = ""
    repair: str = ""


@attrs.frozen
class EngineTable:
    """A table about an engine for the report, such as which provider runs how many nodes.

    Attributes:
        title: What it shows.
        columns: Headings.
        rows: One cell per column: text or a number.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]


@attrs.frozen(kw_only=True)
class BuildRequest:
    """What a backend gets to build an engine from.

    Attributes:
        module: The module on flat tensors: ``module(*inputs)`` takes tensors in the order of
            ``graph.inputs`` and returns a tuple in the order of ``graph.outputs``. In eval mode,
            on ``device``. Export or compile this one.
        graph: What the engine must accept and return.
        samples: Recorded inputs, one flat sequence per call, on ``device``; at least one.
            Read-only.
        device: Where the engine must run, with an index for CUDA.
        work_dir: An empty folder for files; it lives as long as the engine.
        inputs_at: Makes inputs of given dim sizes out of recorded ones.
        check: Compares an engine with eager and raises `ValidationError` where they differ; for
            backends that have several ways to build. The core checks the result again.
        needed_conditions: Returns those of some conditions on sizes, under which an engine was
            built, without which it differs from eager; pass them to `Engine.limit_sizes`. Takes
            the engine, the conditions, and a function that follows the module's code with given
            inputs, by which branches at other sizes are found; None where there is none.
        latencies: Returns the median time of a call of each of some engines, in milliseconds,
            over recorded calls that are timed beside each other; for backends that have several
            ways to build.
        record_attempt: Notes a way of building for the report.
        seconds_left: Seconds that the build may still take; None where there is no limit. What
            can be stopped, such as a child process, must not take longer.
    """

    module: nn.Module
    graph: GraphSpec
    samples: tuple[tuple[Tensor, ...], ...]
    device: torch.device
    work_dir: Path
    inputs_at: Callable[[Mapping[str, int]], tuple[Tensor, ...]]
    check: Callable[[Engine], object]
    needed_conditions: Callable[
        [Engine, Sequence[SizeCondition], Assumptions | None], tuple[SizeCondition, ...]
    ]
    latencies: Callable[[Sequence[Engine]], Sequence[float]]
    record_attempt: Callable[[Attempt], None]
    seconds_left: Callable[[], float | None] = lambda: None


def checked_name(name: str) -> str:
    """Return the name of an artifact, after a look at whether it stays in its folder.

    Raises:
        CheckpointError: It does not, or is not written in its shortest form.
    """
    path = PurePosixPath(name)
    inside = str(path) == name and path.parts and not path.is_absolute() and ".." not in path.parts
    if not inside or "\\" in name or ":" in name:
        msg = f"artifact name must be a relative path inside the checkpoint, got {name!r}"
        raise CheckpointError(msg, path=name, expected="a relative path", got=name)
    return name


class ArtifactWriter:
    """Collects what an engine wants stored: files, and JSON-able data."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.data: dict[str, Any] = {}

    def add_file(self, name: str, source: Path) -> None:
        """Store a file under a relative name.

        Raises:
            CheckpointError: The name leaves the folder, is taken, or there is no such file.
        """
        name = checked_name(name)
        if name in self.files or not source.is_file():
            state = "already added" if name in self.files else f"not found at {source}"
            msg = f"artifact {name!r} is {state}"
            raise CheckpointError(msg, path=name, got=state)
        self.files[name] = source


@attrs.frozen
class ArtifactReader:
    """Gives an engine back what it stored; every file was verified before.

    Attributes:
        directory: Folder with the files; it lives as long as the engine. Do not write to them,
            which other processes may share; there may be new ones beside them.
        files: Relative names of the files.
        data: What was put into `ArtifactWriter.data`.
    """

    directory: Path
    files: tuple[str, ...]
    data: Mapping[str, Any]

    def path(self, name: str) -> Path:
        """Return the path of a stored file.

        Raises:
            CheckpointError: No file of this name was stored.
        """
        if name not in self.files:
            msg = f"the checkpoint holds no file {name!r} for this engine, only {list(self.files)}"
            raise CheckpointError(msg, path=name, expected=name, got=self.files)
        return self.directory / name


class Engine(ABC):
    """A live executable for one graph: flat tensors in, flat tensors out.

    Calls are thread-safe. On CUDA they are ordered on the caller's current stream, and their
    results may be used on it at once. Results are the caller's: no later call changes them.
    Inputs may have any strides and are not written to. Results carry no gradients.

    Args:
        graph: The graph that the engine was built for.
        device: Where it runs.
        backend_name: Name of the backend that built it.

    Attributes:
        compute_dtype: Coarsest floating-point type in which the engine computes, if that is coarser
            than the types of the graph: what it rounds is allowed then. None means as the graph.
    """

    compute_dtype: torch.dtype | None = None

    def __init__(self, graph: GraphSpec, device: torch.device, backend_name: str) -> None:
        self.graph = graph
        self.device = device
        self.backend_name = backend_name
        self._close_lock = threading.Lock()
        self._closed = False

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run on flat inputs.

        Args:
            inputs: One tensor per entry of ``graph.inputs``, in order.

        Returns:
            One tensor per entry of ``graph.outputs``, in order.

        Raises:
            InputMismatchError: The inputs do not fit the graph.
            EngineClosedError: The engine was closed.
        """
        self.graph.check_inputs(inputs)
        return self.run(inputs)

    def limit_sizes(self, conditions: Sequence[SizeCondition]) -> None:
        """Take only sizes that meet conditions; for `Backend.build`, before the engine is used.

        Calls with other sizes miss this engine's graph.

        Raises:
            ConfigError: A condition names a dim that no input has.
        """
        self.graph = attrs.evolve(self.graph, conditions=(*self.graph.conditions, *conditions))

    @abstractmethod
    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run on inputs that are known to fit the graph. Raises `EngineClosedError` when closed."""

    def tables(self) -> Sequence[EngineTable]:
        """Return what a report should show of this engine; nothing by default."""
        return ()

    @abstractmethod
    def save(self, artifacts: ArtifactWriter) -> None:
        """Store what `Backend.load` needs: files and JSON-able data, no pickle."""

    @abstractmethod
    def release(self) -> None:
        """Free runtime and device memory; called once, by `close`.

        A run that is under way in another thread must end well.
        """

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Free runtime and device memory. Further calls do nothing."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self.release()

    def fail_closed(self, operation: str) -> NoReturn:
        """Raise the error for a use after `close`."""
        msg = (
            f"cannot {operation}: this {self.backend_name} engine of graph {self.graph.name!r} is "
            "closed"
        )
        raise EngineClosedError(msg, backend_name=self.backend_name, operation=operation)


class Backend(ABC):
    """A stateless factory of engines: a name and a frozen configuration.

    Args:
        config: The configuration; None means all defaults.

    Raises:
        ConfigError: The configuration is of another class.
    """

    #: Lower case, stable, stored in checkpoints.
    name: ClassVar[str]
    config_class: ClassVar[type[BackendConfig]]

    def __init__(self, config: BackendConfig | None = None) -> None:
        if config is None:
            config = self.config_class()
        if not isinstance(config, self.config_class):
            msg = f"backend {self.name!r} takes a {self.config_class.__name__}, got {config!r}"
            raise ConfigError(msg, field="config", value=config, allowed=self.config_class.__name__)
        self.config = config

    @abstractmethod
    def check_available(self, device: torch.device) -> None:
        """Check that engines can be built and run on ``device`` here.

        Raises:
            BackendUnavailableError: Something is missing; the error says how to get it.
        """

    def diagnose(self) -> Sequence[Diagnosis]:
        """Try what this backend can run on here, and return what came of it.

        ``aitune doctor`` calls this in a child process: what crashes or hangs is reported, so try
        for real, by loading libraries and running something small. By default: `check_available`
        for the CPU and for CUDA.
        """
        return tuple(self._diagnosis(device) for device in ("cpu", "cuda"))

    def _diagnosis(self, device: str) -> Diagnosis:
        try:
            if device == "cuda" and not torch.cuda.is_available():
                return Diagnosis(part=device, available=False, reason="PyTorch sees no CUDA device")
            self.check_available(torch.device(device))
        except BackendUnavailableError as error:
            repair = error.install_hint or ""
            return Diagnosis(part=device, available=False, reason=str(error), repair=repair)
        return Diagnosis(part=device, available=True)

    @abstractmethod
    def build(self, request: BuildRequest) -> Engine:
        """Build an engine for one graph.

        Raises:
            BuildError: It cannot be built; the error names the step and keeps the cause.
        """

    @abstractmethod
    def load(self, artifacts: ArtifactReader, graph: GraphSpec, device: torch.device) -> Engine:
        """Restore an engine that `Engine.save` stored.

        Raises:
            BackendUnavailableError: It cannot run on ``device`` here.
            CheckpointError: The stored data cannot be used.
        """

    def fingerprint(
        self,
        device: torch.device,  # noqa: ARG002 - for those that override it
    ) -> Mapping[str, str] | None:
        """Return what decides the engines that are built here, apart from request and options.

        An engine of an earlier tuning is restored through `load` only where all of it is as it
        was. The core adds what it knows itself: versions of Python and torch, the kind of device,
        and torch's settings.

        By default: versions of the distribution that this class came in and of those that it
        requires, and a hash of its package's sources. Extend it by what else decides, such as
        the version of a driver, or environment variables that a runtime reads.

        Args:
            device: Where engines are to run.

        Returns:
            Values by name. None where engines cannot be stored: each tuning builds anew then,
            and does not spend time on looking for them.
        """
        return package_facts(type(self).__module__)

    def __repr__(self) -> str:
        """Return class and configuration."""
        return f"{type(self).__name__}({self.config!r})"

    def __eq__(self, other: object) -> bool:
        """Backends of one class with equal configurations are equal."""
        return type(self) is type(other) and self.config == other.config

    def __hash__(self) -> int:
        """Hash of class and configuration."""
        return hash((type(self), repr(self.config)))
