"""Results are the caller's: no later call changes them, and writing to them changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from aitune_core._reference import Case
from aitune_core._tensors import same_bits
from aitune_core.backend import Engine
from aitune_core.errors import ValidationError
from aitune_core.specs import GraphSpec

__all__ = ["check_ownership"]


def check_ownership(
    engine: Engine,
    graph: GraphSpec,
    cases: Sequence[Case],
    module: nn.Module,
    differences: Callable[[Engine, Case], Iterable[object]],
) -> None:
    """Check that an engine's results share no memory with anything that lives on.

    The engine is called for a small case, for another one of the same shapes, and after the first
    results were written to, for the small one again. Memory that eager's own results share
    with weights or one another may be shared.

    Args:
        engine: An engine that agrees with eager on the cases.
        graph: The graph.
        cases: The cases, at least one.
        module: The module.
        differences: Compares an engine with the reference on a case.

    Raises:
        ValidationError: A later call changed results (``"overwritten"``), or results share memory
            with inputs, weights, one another or later results (``"aliasing"``).
    """
    case, other = _pair(cases)
    weights = [*module.parameters(), *module.buffers()]
    inputs = case.fresh_inputs()
    results = list(engine(inputs))
    kept = [result.clone() for result in results]
    list(engine(other.fresh_inputs()))
    for spec, result, copy in zip(graph.outputs, results, kept, strict=True):
        if not same_bits(result, copy):
            msg = (
                f"output {spec.path!r} changed when the engine was called again, with other values "
                f"of the same shapes, on {case.label}; results must be the caller's"
            )
            raise ValidationError(msg, output=spec.path, kind="overwritten", case=case.label)
    _check_memory(graph, case, results, inputs, weights)
    written = [
        (result, copy)
        for result, copy in zip(results, kept, strict=True)
        if not _overlap(result, weights) and _writable(result)
    ]
    try:
        # Results may have been made in inference mode, outside of which they cannot be written to.
        with torch.inference_mode():
            for result, copy in written:
                result.copy_(copy == 0)
        list(differences(engine, case))
    except ValidationError as error:
        msg = (
            f"after results were written to, the engine gives others: {error}; results must be "
            "the caller's"
        )
        raise ValidationError(msg, output=error.output, kind="aliasing", case=case.label) from error
    finally:
        with torch.inference_mode():
            for result, copy in written:
                result.copy_(copy)


def _check_memory(
    graph: GraphSpec,
    case: Case,
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> None:
    eager = case.reference
    assert not isinstance(eager, ValidationError)  # noqa: S101 - on it, the engine was refused
    for place, spec in enumerate(graph.outputs):
        result, wanted = results[place], eager[place]
        if _overlap(result, inputs):
            what = "an input"
        elif _overlap(result, weights) and not _overlap(wanted, weights):
            what = "the weights of the module"
        elif _overlap(result, results[:place]) and not _overlap(wanted, eager[:place]):
            what = "another output"
        else:
            continue
        msg = (
            f"output {spec.path!r} shares memory with {what}, on {case.label}; results must be "
            "the caller's"
        )
        raise ValidationError(msg, output=spec.path, kind="aliasing", case=case.label)


def _pair(cases: Sequence[Case]) -> tuple[Case, Case]:
    """Return the smallest case that has another one of the same shapes and other values, and that.

    Where there is none, the smallest case twice.
    """
    ordered = sorted(
        (case for case in cases if not case.strided),
        key=lambda case: sum(tensor.numel() for tensor in case.inputs),
    )
    for case in ordered:
        for other in ordered:
            if _like(case, other):
                return case, other
    return ordered[0], ordered[0]


def _like(one: Case, other: Case) -> bool:
    pairs = list(zip(one.inputs, other.inputs, strict=True))
    return all(a.shape == b.shape for a, b in pairs) and not all(same_bits(a, b) for a, b in pairs)


def _overlap(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(_overlap_of(tensor, other) for other in others)


def _overlap_of(one: Tensor, other: Tensor) -> bool:
    """Whether an element of one lies where one of the other does."""
    (first, last), (begin, end) = _span(one), _span(other)
    if one.device != other.device or first >= end or begin >= last:
        return False
    # Columns of one matrix lie within one another's spans and share nothing.
    return one.dtype != other.dtype or bool(torch.isin(_addresses(one), _addresses(other)).any())


def _addresses(tensor: Tensor) -> Tensor:
    addresses = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = torch.arange(size) * (stride * tensor.element_size())
        addresses = addresses[..., None] + steps
    return addresses


def _writable(tensor: Tensor) -> bool:
    """Whether each element has memory of its own, which expanded ones have not."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size < 2 for size, stride in pairs)  # noqa: PLR2004


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one after its last."""
    if not tensor.numel():
        return 0, 0
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()
