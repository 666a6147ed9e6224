"""Modules tuned with the real backend, beside eager copies of them.

They run on the CPU, or on the device that AITUNE_TEST_DEVICE names.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import pytest
import torch
import torch.onnx._internal.exporter._registration
from torch import Tensor, nn

import aitune_core as ait
from aitune_core._precision import full_float32
from aitune_core._trees import TreeError, flatten

Tune = Callable[..., "Tuned"]

DEVICE: Final = torch.device(os.environ.get("AITUNE_TEST_DEVICE", "cpu"))

#: Allowed share of an element's size plus the root mean square of its tensor.
_SHARES: Final = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out tests about the CPU on other devices."""
    if DEVICE.type != "cpu" and item.get_closest_marker("cpu_only") is not None:
        pytest.skip(f"is about the CPU, not {DEVICE}")


def placed(value: Any) -> Any:
    """Return a deep copy of a value whose tensors are on the device of the tests."""
    tensors: list[Tensor] = []
    if DEVICE.type != "cpu":
        with contextlib.suppress(TreeError):
            flatten(value, tensors)
    # Those that are there already are copied together: views of one memory stay views of one.
    moved = {
        id(tensor): tensor.to(DEVICE) for tensor in tensors if tensor.device.type != DEVICE.type
    }
    return copy.deepcopy(value, moved)


def assert_tensor(expected: Tensor, got: Tensor, path: str) -> None:
    """Check that a tensor has eager's dtype, shape and values, and no gradient."""
    assert (got.dtype, got.shape, got.device) == (
        expected.dtype,
        expected.shape,
        expected.device,
    ), path
    assert not got.requires_grad, path
    if not expected.dtype.is_floating_point:
        assert torch.equal(got, expected), path
        return
    if expected.numel() == 0:
        return
    one, other = expected.double(), got.double()
    finite = one.isfinite()
    assert torch.equal(other.isfinite(), finite), path
    assert torch.equal(one[~finite].isnan(), other[~finite].isnan()), path
    assert torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()), path
    size = torch.where(finite, one.abs(), 0.0)
    allowed = _SHARES.get(expected.dtype, 0.25) * (size + size.square().mean().sqrt())
    worst = torch.where(finite, (one - other).abs() - allowed, 0.0)
    assert bool((worst <= 0).all()), f"{path}: {expected} != {got}"


def assert_same(expected: Any, got: Any, path: str = "out") -> None:
    """Check that two trees have one structure, the same types in it, and the same values."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), path
        assert_tensor(expected.detach(), got, path)
        return
    assert type(expected) is type(got), path
    if isinstance(expected, Mapping):
        assert list(expected) == list(got), path
        for key in expected:
            assert_same(expected[key], got[key], f"{path}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(expected) == len(got), path
        for position, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert_same(one, other, f"{path}[{position}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            name = field.name
            assert_same(getattr(expected, name), getattr(got, name), f"{path}.{name}")
    else:
        assert repr(expected) == repr(got), path


@attrs.define(eq=False)
class Tuned:
    """A tuned module, its eager twin, and the count of calls that ran eagerly."""

    model: Any
    eager: nn.Module
    report: ait.TuneReport
    eager_calls: int = 0

    @property
    def graphs(self) -> tuple[ait.GraphReport, ...]:
        """The graphs of the module."""
        return self.report.modules[0].graphs

    @property
    def winners(self) -> list[str | None]:
        """The backend of each graph."""
        return [graph.winner for graph in self.graphs]

    def expected(self, *args: Any, **kwargs: Any) -> Any:
        """Return eager's result for copies of the arguments."""
        args, kwargs = placed((args, kwargs))
        with torch.no_grad(), full_float32():
            return self.eager(*args, **kwargs)

    def same(self, *args: Any, **kwargs: Any) -> Any:
        """Check that a call gives and does what eager does, on an engine; returns its result."""
        before = self.eager_calls
        theirs, ours = placed((args, kwargs)), placed((args, kwargs))
        with torch.no_grad(), full_float32():
            expected = self.eager(*theirs[0], **theirs[1])
        got = self.model(*ours[0], **ours[1])
        assert self.eager_calls == before, "the call ran eagerly"
        assert_same(expected, got)
        assert_same(theirs[0], ours[0], "args")
        assert_same(theirs[1], ours[1], "kwargs")
        return got

    def misses(self, *args: Any, **kwargs: Any) -> ait.InputMismatchError:
        """Check that no graph takes a call; returns the error that says why."""
        with pytest.raises(ait.InputMismatchError) as caught:
            self.model(*placed(args), **placed(kwargs))
        return caught.value


def tune_module(
    module: nn.Module,
    calls: Sequence[Any],
    *,
    reference: nn.Module | None = None,
    on_miss: str = "error",
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    on_failure: str = "raise",
    wins: bool = True,
    **settings: Any,
) -> Tuned:
    """Tune a module with ONNX Runtime and watch its ``forward``.

    Args:
        module: Is put into eval mode.
        calls: Tensors, tuples of arguments, or ``(args, kwargs)``; copied before they are used.
        reference: Eager twin; None means a copy of the module.
        on_miss: As of `ait.Module`; an error unless a test is about misses.
        dynamic_shapes: As of `ait.Module`.
        options: Options of the backend.
        on_failure: As of `ait.tune`.
        wins: Whether every graph must end on an engine.
        settings: Further arguments of `ait.tune`.
    """
    module.eval().to(DEVICE)
    eager = copy.deepcopy(module) if reference is None else reference
    for part in eager.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()  # a copy's weights are not in one piece, of which cuDNN warns
    backend = (
        "onnxruntime",
        {"execution_provider": DEVICE.type, "isolate": False, **(options or {})},
    )
    model: Any = ait.Module(
        module,
        on_miss=on_miss,  # type: ignore[arg-type]
        dynamic_shapes=dynamic_shapes,
        strategy=ait.OneBackendStrategy(backend),
    )
    report = ait.tune(
        model,
        placed(list(calls)),
        device=DEVICE,
        on_failure=on_failure,  # type: ignore[arg-type]
        **settings,
    )
    tuned = Tuned(model, eager, report)
    if wins:
        assert set(tuned.winners) == {"onnxruntime"}, str(report)
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        tuned.eager_calls += 1
        return forward(*args, **kwargs)

    module.__dict__["forward"] = counted
    return tuned


@pytest.fixture(scope="session", autouse=True)
def short_tunings() -> Iterator[None]:
    """Leave out what makes a tuning long and counts for nothing here.

    Engines are timed in a few rounds without pauses, and torch's exporter translates its table of
    operators once instead of once per export.
    """
    registry = torch.onnx._internal.exporter._registration.ONNXRegistry
    gc.freeze()  # the collection after each export passes over all that was imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aitune_core._stopwatch._PAUSE_SECONDS", 0.0)
        patch.setattr("aitune_core._measurement._BUDGET_SECONDS", 0.0)
        patch.setattr("aitune_core._measurement._LOOKS", (2, 4))
        once = staticmethod(functools.cache(registry.from_torchlib))
        patch.setattr(registry, "from_torchlib", once)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the tests."""
    return DEVICE


@pytest.fixture(scope="session", autouse=True)
def on_device() -> Iterator[None]:
    """Make tensors on the device of the tests where nothing else is said."""
    if DEVICE.type == "cpu":
        yield
        return
    with DEVICE:
        yield


@pytest.fixture
def tune() -> Tune:
    """Return `tune_module`."""
    return tune_module


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """Return `assert_same`."""
    return assert_same


@pytest.fixture(scope="module")
def tune_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tune]:
    """Return `tune_module` for fixtures that serve all tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AITUNE_CACHE_DIR", str(tmp_path_factory.mktemp("aitune-cache")))
        yield tune_module
