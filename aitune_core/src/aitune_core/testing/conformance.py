"""The contract of backends and engines, as tests that a backend's author inherits."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import attrs
import pytest
import torch
from torch import Tensor, nn

from aitune_core._synthesis import corner_sizes, distinct_sizes, strided_copies
from aitune_core._tensors import same_bits
from aitune_core.backend import ArtifactReader, ArtifactWriter, Backend, Engine, EngineTable
from aitune_core.config import BackendConfig
from aitune_core.errors import (
    BackendUnavailableError,
    BuildError,
    CheckpointError,
    ConfigError,
    EngineClosedError,
    InputMismatchError,
)
from aitune_core.testing._building import Built, build, request_for
from aitune_core.testing._cases import CASES, Case, dtypes_case
from aitune_core.testing._contract import contract, expect
from aitune_core.testing._reloading import outputs_of_another_process

__all__ = ["BackendConformance"]

_Engines: TypeAlias = Callable[[str], Built]
_NAMES = (*(case.name for case in CASES), "dtypes")
_DYNAMIC = ("mlp", "conv", "embedding")
_THREADS = 8
_CALLS = 20
_CALLS_UNTIL_CLOSED = 200

each_case = pytest.mark.parametrize("name", _NAMES)


@attrs.frozen(kw_only=True)
class _OtherConfig(BackendConfig):
    """A configuration of no backend."""


class _Broken(nn.Module):
    """Raises, whatever it is given."""

    def forward(self, *_inputs: Tensor) -> tuple[Tensor, ...]:
        msg = "this module cannot run"
        raise ArithmeticError(msg)


class BackendConformance:
    """Tests that every backend passes: subclass it in a test file, and set what follows.

    Engines are built once per module and class, so keep the tests of a class in one process.

    Example::

        from aitune_core.testing import BackendConformance


        class TestMyBackend(BackendConformance):
            backend_class = MyBackend
            options = {"level": 2}

    Attributes:
        backend_class: The backend. Importable by another process, by name or from its file.
        options: Options that it is tested with, by name.
        device: Where; tests are skipped where there is no such device.
        dtypes: Element types that it takes and returns.
        can_store: Whether engines can be saved; where not, saving must say so.
        refuses: Modules of the kit that it cannot build, with the reason. Each must be refused
            with a `BuildError`; the names are those in the ids of tests, such as ``"in_place"``.
    """

    backend_class: ClassVar[type[Backend]]
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.int64, torch.bool)
    can_store: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {}

    # ------------------------------------------------------------------------------- fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls) -> Backend:
        """The backend under test."""
        if cls.device.startswith("cuda") and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")
        with contract("a backend is made from its configuration alone"):
            return cls.backend_class(cls.backend_class.config_class.from_options(cls.options))

    @pytest.fixture(scope="class")
    @classmethod
    def engines(cls, backend: Backend) -> _Engines:
        """Gives the engine of a module of the kit, built at its first use."""
        built: dict[str, Built] = {}

        def engine(name: str) -> Built:
            if name in cls.refuses:
                pytest.skip(f"refused: {cls.refuses[name]}")
            if name not in built:
                built[name] = cls._build(backend, name)
            return built[name]

        return engine

    @classmethod
    def _case(cls, name: str) -> Case:
        return {case.name: case for case in (*CASES, dtypes_case(cls.dtypes))}[name]

    @classmethod
    def _build(cls, backend: Backend, name: str) -> Built:
        request = request_for(cls._case(name), torch.device(cls.device), backend.name)
        with contract(f"a backend builds the module {name!r} of the kit, or `refuses` names it"):
            built = build(backend, request)
        expect(isinstance(built.engine, Engine), "build returns an Engine", repr(built.engine))
        return built

    # -------------------------------------------------------------------------------- backend

    def test_is_named_and_configured(self, backend: Backend) -> None:
        """A backend has a stable name, and its configuration survives JSON."""
        name = backend.name
        expect(
            name and name == name.lower().strip(),
            "the name of a backend is a lower-case string",
            repr(name),
        )
        config = backend.config
        with contract("from_options makes an equal configuration of what to_options gives"):
            options = json.loads(json.dumps(config.to_options(), allow_nan=False))
            again = type(config).from_options(options)
        expect(again == config, "a configuration survives JSON", f"{config} became {again}")
        same = type(backend)(again)
        expect(
            same == backend and hash(same) == hash(backend),
            "backends of one class with equal configurations are equal, and have one hash",
            f"{same!r} is not {backend!r}",
        )
        expect(
            attrs.has(type(config)) and type(config).__setattr__ is not object.__setattr__,
            "a configuration is frozen: @attrs.frozen(kw_only=True)",
            type(config),
        )

    def test_refuses_wrong_configurations(self, backend: Backend) -> None:
        """A wrong configuration is a `ConfigError`."""
        words = "a configuration of another class is refused with a ConfigError"
        expect_error(ConfigError, words, lambda: type(backend)(_OtherConfig()))
        words = "an unknown option is refused with a ConfigError"
        expect_error(
            ConfigError, words, lambda: backend.config_class.from_options({"no such option": 1})
        )

    def test_says_whether_it_is_available(self, backend: Backend) -> None:
        """``check_available`` returns, or raises `BackendUnavailableError`."""
        with contract(f"check_available returns for {self.device}, on which it is tested"):
            backend.check_available(torch.device(self.device))
        try:
            with contract("check_available raises nothing but BackendUnavailableError"):
                try:
                    backend.check_available(torch.device("meta"))
                except BackendUnavailableError as error:
                    name = error.backend_name
                    expect(name == backend.name, "the error names the backend", repr(name))
        finally:
            backend.check_available(torch.device(self.device))

    def test_fingerprint_is_stable(self, backend: Backend) -> None:
        """``fingerprint`` is None, or text by name, and the same each time."""
        device = torch.device(self.device)
        first = backend.fingerprint(device)
        again = type(backend)(backend.config).fingerprint(device)
        expect(first == again, "fingerprint is the same each time", f"{first} and {again}")
        texts = () if first is None else (*first, *first.values())
        fine = all(type(text) is str for text in texts)
        expect(fine, "fingerprint gives strings by name, or None", first)

    def test_failing_builds_are_build_errors(self, backend: Backend) -> None:
        """What cannot be built is a `BuildError`."""
        request = request_for(self._case("mlp"), torch.device(self.device), backend.name)
        broken = attrs.evolve(request, module=_Broken().eval())
        words = (
            "build turns whatever a module, an exporter or a compiler raises into a BuildError "
            "that keeps the cause"
        )
        try:
            with torch.no_grad():
                engine = backend.build(broken)
        except BuildError as error:
            expect(error.backend_name == backend.name, "a BuildError names the backend", error)
        except Exception as error:
            msg = f"Contract: {words}.\nHere: {type(error).__name__}: {error}"
            raise pytest.fail.Exception(msg) from error
        else:
            engine.close()  # a backend that looks at nothing until it is called

    def test_what_it_refuses_is_refused_with_the_reason(self, backend: Backend) -> None:
        """Modules that `refuses` names are a `BuildError` with words."""
        for name in self.refuses:
            expect(name in _NAMES, "refuses names modules of the kit", f"{name!r} of {_NAMES}")
            request = request_for(self._case(name), torch.device(self.device), backend.name)
            words = f"build refuses {name!r} with a BuildError"
            error = expect_error(BuildError, words, functools.partial(backend.build, request))
            expect(str(error), "a BuildError says why", repr(error))

    # ---------------------------------------------------------------------------------- builds

    @each_case
    def test_build_is_an_engine_of_the_graph(self, engines: _Engines, name: str) -> None:
        """``build`` returns an engine of the graph, on the device, that is open."""
        built = engines(name)
        engine, graph = built.engine, built.request.graph
        words = "an engine is of the request's graph; only limit_sizes adds conditions"
        found = attrs.evolve(engine.graph, conditions=graph.conditions)
        expect(found == graph, words, engine.graph)
        expect(
            engine.device == built.request.device
            and engine.backend_name == self.backend_class.name,
            "an engine knows its device and the name of its backend",
            f"{engine.device} and {engine.backend_name!r}",
        )
        expect(not engine.closed, "a new engine is open", "closed")
        tables = list(engine.tables())
        fine = all(isinstance(table, EngineTable) for table in tables)
        expect(fine, "tables() gives EngineTable objects", tables)

    @each_case
    def test_nothing_is_printed(self, engines: _Engines, name: str) -> None:
        """Neither building nor calling prints or warns; use `record_attempt` or logging."""
        printed = engines(name).seen.printed
        words = "building and calling print nothing and give no warnings"
        expect(not printed, words, f"{printed[:1000]!r}")

    @each_case
    def test_nothing_else_is_changed(self, engines: _Engines, name: str) -> None:
        """Building and calling leave the process, the module and the samples as they were."""
        changed = engines(name).seen.changed
        words = "building and calling change no state of the process, no weights and no samples"
        expect(not changed, words, "; ".join(changed))

    # --------------------------------------------------------------------------------- results

    @each_case
    def test_results_agree_with_eager(self, engines: _Engines, name: str) -> None:
        """Results are eager's: how many, in which order, of which dtype, shape and values."""
        built = engines(name)
        words = "an engine gives what the module gives: tensors in the order of graph.outputs"
        for number, sample in enumerate(built.request.samples):
            with contract(words):
                built.check(_copies(sample), f"recorded call {number}")

    @each_case
    def test_passes_the_numeric_check(self, engines: _Engines, name: str) -> None:
        """The check that decides in a tuning, at other sizes, layouts and values."""
        built = engines(name)
        with contract("an engine passes the numeric check of tune"):
            built.request.check(built.engine)

    @pytest.mark.parametrize("name", _DYNAMIC)
    def test_takes_every_size_in_the_ranges(self, engines: _Engines, name: str) -> None:
        """Dims take all sizes from ``min`` to ``max``, and no others."""
        built = engines(name)
        graph = built.request.graph
        sizes = {**corner_sizes(graph), "interior": distinct_sizes(graph)}
        for label, wanted in sizes.items():
            with contract("an engine takes every size in the ranges of its dims"):
                built.check(built.request.inputs_at(wanted), f"{label} ({wanted})")
        largest = {dim: spec.max + 1 for dim, spec in graph.dims.items()}
        beyond = built.request.inputs_at(largest)
        words = "sizes out of range are an InputMismatchError"
        expect_error(InputMismatchError, words, lambda: built.engine(beyond))

    @pytest.mark.parametrize("name", ["mlp", "several", "dtypes"])
    def test_takes_any_strides(self, engines: _Engines, name: str) -> None:
        """Inputs may be views: strided, transposed, expanded, or in the middle of memory."""
        built = engines(name)
        sample = built.request.samples[0]
        layouts: dict[str, Sequence[Tensor]] = {
            "every second element": strided_copies(sample),
            "transposed": [tensor.mT.contiguous().mT for tensor in sample],
            "in the middle of memory": [torch.cat((tensor, tensor))[1:-1] for tensor in sample],
            "expanded, with stride 0": [tensor[:1].expand_as(tensor) for tensor in sample],
        }
        for label, inputs in layouts.items():
            fitting = [tensor[: each.shape[0]] for tensor, each in zip(inputs, sample, strict=True)]
            with contract("an engine takes inputs of any strides and storage offset"):
                built.check(fitting, label)

    @each_case
    def test_inputs_are_left_alone(self, engines: _Engines, name: str) -> None:
        """Engines do not write to inputs; what the module changes is a further output."""
        built = engines(name)
        inputs = _copies(built.request.samples[0])
        kept = _copies(inputs)
        with contract("an engine runs on the recorded call"):
            built.engine(inputs)
        fine = all(map(same_bits, inputs, kept))
        expect(fine, "an engine does not write to its inputs", "an input has other values")

    @pytest.mark.parametrize("name", ["mlp", "several", "in_place"])
    def test_results_stay_valid(self, engines: _Engines, name: str) -> None:
        """Results are the caller's: later calls do not change them, writing harms none."""
        built = engines(name)
        inputs = _copies(built.request.samples[0])
        others = [tensor + 1 for tensor in inputs]
        with contract("an engine runs on the recorded call"):
            results = list(built.engine(inputs))
        kept = _copies(results)
        for _ in range(3):
            built.engine(others)
        fine = all(map(same_bits, results, kept))
        expect(fine, "results stay valid after later calls", "a later call changed a result")
        with torch.inference_mode():
            for result in results:
                result.fill_(-1)
        with contract("writing to results changes no later result"):
            built.check(inputs, "after results were written to")

    def test_results_carry_no_gradients(self, engines: _Engines) -> None:
        """Results require no grad, whatever the grad mode."""
        built = engines("mlp")
        inputs = [tensor.clone().requires_grad_() for tensor in built.request.samples[0]]
        with torch.enable_grad(), contract("inputs may require grad while gradients are enabled"):
            results = built.engine(inputs)
        fine = not any(result.requires_grad for result in results)
        expect(fine, "results carry no gradients, whatever the grad mode", "requires_grad")

    def test_inputs_that_do_not_fit_are_refused(self, engines: _Engines) -> None:
        """Other counts, dtypes and ranks are an `InputMismatchError`."""
        built = engines("several")
        sample = built.request.samples[0]
        wrong = {
            "too few": sample[:-1],
            "of another dtype": [tensor.double() for tensor in sample],
            "of another rank": [tensor[None] for tensor in sample],
        }
        for label, inputs in wrong.items():
            words = f"inputs that are {label} are an InputMismatchError"
            expect_error(InputMismatchError, words, functools.partial(built.engine, inputs))

    # --------------------------------------------------------------------- threads and streams

    def test_calls_from_threads(self, engines: _Engines) -> None:
        """An engine may be called from several threads at once."""
        built = engines("mlp")
        base = built.request.samples[0]
        inputs = [[tensor + number for tensor in base] for number in range(_THREADS)]
        errors: list[Exception] = []
        start = threading.Barrier(_THREADS)

        def call(number: int) -> None:
            start.wait()
            try:
                for _ in range(_CALLS):
                    built.check(inputs[number], f"thread {number}")
            except Exception as error:  # noqa: BLE001 - shown below
                errors.append(error)

        _run_threads(call)
        words = f"{_THREADS} threads may call an engine at once, and each gets its own results"
        expect(not errors, words, errors[:1])

    def test_runs_on_the_callers_stream(self, engines: _Engines) -> None:
        """On CUDA, a call is ordered on the caller's current stream."""
        if not self.device.startswith("cuda"):
            pytest.skip("only on CUDA")
        built = engines("mlp")
        sample = built.request.samples[0]
        wanted = [tensor + 5 for tensor in sample]
        inputs = [torch.zeros_like(tensor) for tensor in sample]
        torch.cuda.synchronize()
        cuda: Any = torch.cuda  # which is not typed
        with cuda.stream(cuda.Stream()):
            cuda._sleep(50_000_000)  # noqa: SLF001 - nothing else keeps a stream busy
            for tensor, values in zip(inputs, wanted, strict=True):
                tensor.copy_(values)
            results = [result * 1 for result in built.engine(inputs)]
            torch.cuda.current_stream().synchronize()
        words = (
            "a call waits for what the caller's current stream does before it, and results may be "
            "used on that stream at once"
        )
        with contract(words):
            built.compare(wanted, results, "inputs that are still being computed")

    # --------------------------------------------------------------------------------- storing

    @pytest.mark.parametrize("name", ["mlp", "embedding", "several", "in_place"])
    def test_a_new_process_loads_what_was_saved(
        self, backend: Backend, engines: _Engines, name: str, tmp_path: Path
    ) -> None:
        """What `Engine.save` stores is all that `Backend.load` needs."""
        built = engines(name)
        if not self.can_store:
            words = "an engine that cannot be stored says so with a CheckpointError"
            expect_error(CheckpointError, words, lambda: built.engine.save(ArtifactWriter()))
            words = "a backend that stores no engines loads none: CheckpointError"
            reader = ArtifactReader(tmp_path, (), {})
            device = torch.device(self.device)
            graph = built.request.graph
            expect_error(CheckpointError, words, lambda: backend.load(reader, graph, device))
            return
        inputs = _copies(built.request.samples[-1])
        with contract("what save stores, load restores in another process, without the module"):
            outputs = outputs_of_another_process(backend, built.engine, inputs, tmp_path)
        with contract("a loaded engine gives what the saved one gave"):
            built.compare(inputs, outputs, "the recorded call, loaded")

    def test_incomplete_files_are_checkpoint_errors(
        self, backend: Backend, engines: _Engines, tmp_path: Path
    ) -> None:
        """Loading what cannot be used is a `CheckpointError`."""
        graph = engines("mlp").request.graph
        reader = ArtifactReader(tmp_path, (), {})
        words = "load refuses data that it cannot use with a CheckpointError"
        device = torch.device(self.device)
        expect_error(CheckpointError, words, lambda: backend.load(reader, graph, device))

    # --------------------------------------------------------------------------------- closing

    def test_closing(self, backend: Backend) -> None:
        """Closing twice is fine, runs under way end well, later ones are `EngineClosedError`."""
        if "mlp" in self.refuses:
            pytest.skip(f"refused: {self.refuses['mlp']}")
        built = self._build(backend, "mlp")
        engine, inputs = built.engine, built.request.samples[0]
        errors: list[Exception] = []
        start = threading.Barrier(_THREADS + 1)

        def call(_: int) -> None:
            start.wait()
            try:
                for _ in range(_CALLS_UNTIL_CLOSED):
                    built.check(inputs, "while another thread closes the engine")
            except EngineClosedError:
                return
            except Exception as error:  # noqa: BLE001 - shown below
                errors.append(error)

        def close() -> None:
            start.wait()
            engine.close()

        _run_threads(call, close)
        words = "runs that are under way while an engine is closed end well, later ones raise"
        expect(not errors, f"{words} EngineClosedError", errors[:1])
        with contract("an engine may be closed twice"):
            engine.close()
        expect(engine.closed, "a closed engine says so", "closed is False")
        words = "a closed engine cannot be called: EngineClosedError"
        error = expect_error(EngineClosedError, words, lambda: engine(inputs))
        name = getattr(error, "backend_name", None)
        expect(name == backend.name, "the error names the backend", repr(name))


def expect_error(
    kind: type[Exception], words: str, action: Callable[[], object]
) -> Exception | None:
    """Fail unless an action raises an error of a kind, which is returned."""
    try:
        result = action()
    except kind as error:
        return error
    except Exception as error:
        msg = f"Contract: {words}.\nHere: {type(error).__name__}: {error}"
        raise pytest.fail.Exception(msg) from error
    pytest.fail(f"Contract: {words}.\nHere: no error, but {result!r:.200}")


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _run_threads(target: Callable[[int], None], beside: Callable[[], None] | None = None) -> None:
    threads = [threading.Thread(target=target, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    if beside is not None:
        beside()
    for thread in threads:
        thread.join()
