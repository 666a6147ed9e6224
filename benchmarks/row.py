"""One row, measured in a process of its own: eager, aitune and ``torch.compile``.

A new process, so that no row finds memory, caches or compiled code of another. The row is written
before ``torch.compile`` starts, and again with it.
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import attrs
import torch
from torch import Tensor, nn

import aitune_core as ait
from benchmarks.comparison import difference, tensors
from benchmarks.memory import PeakSampler, ignore_captures, used_bytes
from benchmarks.models import made_inputs, made_model
from benchmarks.options import add_case_arguments, case_arguments, case_of
from benchmarks.plan import HEADLINE_BATCH, Case
from benchmarks.results import Contender, Memory, Row, write_atomically
from benchmarks.timing import LEAST_CALLS, measured

__all__ = ["main"]

_Built = TypeVar("_Built", bound=Callable[..., object])

#: Seconds of the limit that must be left for ``torch.compile`` to be started.
_COMPILE_SECONDS: Final = 90
_SMALL_COMPILE_SECONDS: Final = 30
#: Calls after which ``torch.compile`` replays: one to compile, one to record, one to replay.
_COMPILE_CALLS: Final = 3
_WARM_CALLS: Final = 20
_SMALL_LEAST_CALLS: Final = 20


@attrs.define
class _Measuring:
    """A row in the making.

    Attributes:
        case: Which one.
        device: Where it runs.
        small: Whether it is one of a trial.
        net: The model.
        inputs: Arguments of the calls that are timed.
        calls: Contenders that can be timed; their results are right.
        row: What is known.
    """

    case: Case
    device: torch.device
    small: bool
    net: nn.Module
    inputs: tuple[Tensor, ...]
    calls: dict[str, Callable[[], object]]
    row: Row

    @classmethod
    def of(cls, case: Case, device: torch.device, *, small: bool) -> _Measuring:
        net = made_model(case, small=small).to(device)
        inputs = tuple(value.to(device) for value in made_inputs(case, small=small))
        return cls(case, device, small, net, inputs, {"eager": lambda: net(*inputs)}, Row())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def note(self, name: str, contender: Contender) -> None:
        self.row = attrs.evolve(self.row, contenders={**self.row.contenders, name: contender})

    def built(self, name: str, build: Callable[[], _Built]) -> _Built | None:
        """Build a contender, call it, and compare it with eager at other values.

        Returns:
            The contender; None where it failed or its result is wrong, and the row says so.
        """
        others = tuple(
            value.to(self.device) for value in made_inputs(self.case, small=self.small, seed=1)
        )
        try:
            start = time.perf_counter()
            contender = build()
            self.synchronize()
            seconds = time.perf_counter() - start
            for _ in range(_WARM_CALLS):
                contender(*self.inputs)
            largest, allowed = difference(tensors(self.net(*others)), tensors(contender(*others)))
        except Exception as error:  # noqa: BLE001 - the row says it
            self.note(name, Contender(problem=_described(error)))
            return None
        self.calls[name] = lambda: contender(*self.inputs)
        done = Contender(build_seconds=seconds, max_difference=largest, allowed_difference=allowed)
        self.note(name, done)
        return contender

    def measure(self, seconds: float) -> None:
        """Time all calls beside each other."""
        timings = measured(
            self.calls,
            synchronize=self.synchronize,
            seconds=seconds,
            least_calls=_SMALL_LEAST_CALLS if self.small else LEAST_CALLS,
        )
        for name, timing in timings.items():
            known = self.row.contenders.get(name, Contender())
            self.note(name, attrs.evolve(known, timing=timing))

    def tuned(self) -> ait.Module:
        """Tune the model, with an eye on the memory of the device."""
        strategy = ait.OneBackendStrategy(backend=ait.backend("onnxruntime"))
        model = ait.Module(self.net, self.case.key, strategy=strategy, on_miss="error")
        if self.device.type != "cuda":
            ait.tune(model, [self.inputs], device=self.device)
            return model
        before = used_bytes(self.device)
        with PeakSampler(lambda: used_bytes(self.device), ignore_captures) as sampler:
            ait.tune(model, [self.inputs], device=self.device)
        after = used_bytes(self.device)
        memory = Memory(before=before, peak=sampler.peak, after_tuning=after, after_calls=after)
        self.row = attrs.evolve(self.row, memory=memory)
        return model

    def look_at_memory(self) -> None:
        """Note the memory after calls."""
        if self.row.memory is not None:
            memory = attrs.evolve(self.row.memory, after_calls=used_bytes(self.device))
            self.row = attrs.evolve(self.row, memory=memory)

    def compiled(self) -> Callable[..., object]:
        """Compile the model and call it until it replays."""
        module = torch.compile(self.net, mode="reduce-overhead")
        for _ in range(_COMPILE_CALLS):
            module(*self.inputs)
        return module

    def first_answer(self, model: ait.Module) -> None:
        """Save the tuned module and time its first result in a new process."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, expected = Path(folder, "model.ait"), Path(folder, "expected.pt")
            ait.save(model, checkpoint)
            torch.save(tensors(self.net(*self.inputs)), expected)
            command = [
                *(sys.executable, "-m", "benchmarks.first_answer"),
                *case_arguments(self.case, str(self.device), small=self.small),
                *("--checkpoint", str(checkpoint), "--expected", str(expected)),
            ]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            last = " ".join(done.stderr.strip().splitlines()[-1:])
            problem = f"first answer: exit status {done.returncode}: {last}"
            self.row = attrs.evolve(self.row, problem=problem)
        else:
            seconds = float(done.stdout.split()[-1])
            self.row = attrs.evolve(self.row, first_answer_seconds=seconds)


def _described(error: Exception) -> str:
    """Return kind and text of an error, or of those in a group, in one line."""
    parts = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    text = "; ".join(f"{type(part).__name__}: {part}" for part in parts)
    return " ".join(text.split())[:500]


def _measure(arguments: argparse.Namespace) -> None:
    end = time.perf_counter() + arguments.seconds_left
    case, device = case_of(arguments), torch.device(arguments.device)
    making = _Measuring.of(case, device, small=arguments.small)
    making.calls["eager"]()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = making.built("ours", making.tuned)
    making.look_at_memory()
    if model is not None and case.batch == HEADLINE_BATCH:
        making.first_answer(model)
    making.measure(arguments.seconds)

    needed = _SMALL_COMPILE_SECONDS if arguments.small else _COMPILE_SECONDS
    left = end - time.perf_counter()
    reason = "cut off by the limit on time, or ended"
    if arguments.no_compile:
        reason = "left out: --no-compile"
    elif left < needed:
        reason = f"left out: {left:.0f} s of the limit were left, {needed} s are wanted"
    making.note("compile", Contender(problem=reason))
    write_atomically(arguments.out, making.row.to_json())
    if arguments.no_compile or left < needed:
        return
    if making.built("compile", making.compiled) is not None:
        making.measure(arguments.seconds)
    write_atomically(arguments.out, making.row.to_json())


def main() -> None:
    """Measure a row and write it."""
    parser = argparse.ArgumentParser()
    add_case_arguments(parser)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seconds", required=True, type=float, help="time per kind of call")
    parser.add_argument("--seconds-left", type=float, default=math.inf)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    with torch.no_grad():
        _measure(arguments)


if __name__ == "__main__":
    main()
