"""Engines of the kit's modules, built from real requests."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from aitune_core._cache import new_work_dir, remove_with
from aitune_core._calls import CallForm
from aitune_core._comparison import compare
from aitune_core._graphs import recorded_graphs
from aitune_core._recording import ModuleRecording
from aitune_core._tensors import same_bits
from aitune_core._tolerances import derived_tolerance
from aitune_core._trial import GraphTrial
from aitune_core.backend import Backend, BuildRequest, Engine
from aitune_core.errors import ValidationError
from aitune_core.testing._cases import Case
from aitune_core.testing._watching import Watched, watching

__all__ = ["Built", "build", "request_for"]


@attrs.frozen(eq=False)
class Built:
    """An engine, and what was noticed while it was built and called once.

    Attributes:
        engine: The engine.
        request: What it was built from.
        seen: What was printed and changed.
    """

    engine: Engine
    request: BuildRequest
    seen: Watched

    def eager(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the module gives."""
        with torch.no_grad():
            return tuple(self.request.module(*inputs))

    def compare(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], label: str) -> None:
        """Compare outputs with what eager gives for ``inputs``.

        Raises:
            ValidationError: They differ.
        """
        expected = self.eager(inputs)
        if len(outputs) != len(expected):
            msg = f"eager returns {len(expected)} tensors, the engine {len(outputs)}"
            raise ValidationError(msg, kind="count", expected=len(expected), got=len(outputs))
        computes = self.engine.compute_dtype
        for spec, right, got in zip(self.request.graph.outputs, expected, outputs, strict=True):
            share = derived_tolerance(right.dtype, right.device, computes=computes)
            compare(spec, right, got, label, share=share)

    def check(self, inputs: Sequence[Tensor], label: str) -> None:
        """Run the engine, and compare with eager. Raises as `compare`."""
        self.compare(inputs, self.engine(inputs), label)


def request_for(case: Case, device: torch.device, kind: str) -> BuildRequest:
    """Return a request as a tuning makes it, with the numeric check and all."""
    torch.manual_seed(0)
    module = case.make().eval().to(device)
    recording = ModuleRecording(case.name, module, CallForm.of(module.forward))
    with torch.no_grad():
        for call in case.calls():
            args = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), call)
            recording.record(args, {})
    (graph,) = recorded_graphs(recording, None)
    trial = GraphTrial(
        case.name, graph, (), device, started=lambda _: None, finished=lambda _: None
    )
    work_dir = new_work_dir(kind, f"conformance-{case.name}")
    return trial.request(work_dir)


def build(backend: Backend, request: BuildRequest) -> Built:
    """Build an engine and call it once."""
    seen = Watched()
    state = {name: value.clone() for name, value in request.module.state_dict().items()}
    samples = [[tensor.clone() for tensor in sample] for sample in request.samples]
    with watching(seen), torch.no_grad():
        engine = backend.build(request)
        if isinstance(engine, Engine):
            remove_with(engine, request.work_dir)
            with contextlib.suppress(Exception):  # tests that call it show the error
                engine(request.samples[0])
    seen.changed.extend(_changed(request, state, samples))
    return Built(engine, request, seen)


def _changed(
    request: BuildRequest, state: Mapping[str, Tensor], samples: Sequence[Sequence[Tensor]]
) -> Iterator[str]:
    now = request.module.state_dict()
    if list(now) != list(state) or not all(map(same_bits, now.values(), state.values())):
        yield "weights of the module"
    if request.module.training:
        yield "the module is in training mode"
    pairs = zip(itertools.chain(*samples), itertools.chain(*request.samples), strict=True)
    if not all(same_bits(one, other) for one, other in pairs):
        yield "recorded samples"
