"""Eager in a wider type: the values that it rounds."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from aitune_core._comparison import relative_error, same_places
from aitune_core._flat import FlatModule
from aitune_core._precision import exact_float32
from aitune_core._tensors import computable
from aitune_core._tolerances import trusted_error
from aitune_core._widening import (
    NotFollowedError,
    Widening,
    own_type,
    sharing_copy,
    wider_type,
)
from aitune_core.specs import GraphSpec, dtype_name

__all__ = ["Correction", "PreciseModule"]


@attrs.frozen(eq=False)
class Correction:
    """What eager's outputs lack, and how much that is.

    Attributes:
        tensors: For each output what has to be added to eager's; None where nothing has.
        errors: For each output the largest relative error of an element of eager's.
    """

    tensors: tuple[Tensor | None, ...]
    errors: tuple[float, ...]


class PreciseModule:
    """A module run in float64, or in float32 where it computes in half precision.

    It runs as a copy that shares all tensors with the module, so that nothing is changed there and
    no weights are held twice; an operator's arguments are widened while it runs.

    Args:
        flat_module: The eager module on flat tensors.
        graph: The graph.
        sample: Flat inputs.

    Attributes:
        own: Type in which most of the module computes.
        wide: Type that it is run in; None where eager is precise enough.
    """

    def __init__(self, flat_module: FlatModule, graph: GraphSpec, sample: Sequence[Tensor]) -> None:
        self.own = own_type(flat_module.module, sample)
        self.wide = wider_type(self.own)
        self._graph = graph
        self._original = flat_module
        self._copy: FlatModule | None = None
        self._widening: Widening | None = None

    def correction(self, inputs: Sequence[Tensor], eager: Sequence[Tensor]) -> Correction:
        """Return what eager's outputs lack.

        Args:
            inputs: Flat inputs.
            eager: What eager gives for them.

        Raises:
            NotFollowedError: What the wider type gives is no more precise form of eager's
                outputs, or cannot be computed; says why.
        """
        try:
            wide = self._outputs(inputs)
        except NotFollowedError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            msg = f"the module raises {text:.200}"
            raise NotFollowedError(msg) from error
        pairs = list(zip(self._graph.outputs, eager, wide, strict=True))
        return Correction(
            tuple(_lacking(one, other, spec.path) for spec, one, other in pairs),
            tuple(self._error(one, other, spec.path) for spec, one, other in pairs),
        )

    def _outputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        assert self.own is not None  # noqa: S101 - asked where `wide` is known only
        assert self.wide is not None  # noqa: S101
        if self._copy is None or self._widening is None:
            module = self._original.module
            self._copy = self._original.around(sharing_copy(module))
            self._widening = Widening(
                self.wide, self.own, (*module.parameters(), *module.buffers())
            )
        with torch.no_grad(), exact_float32(), self._widening.active():
            outputs: tuple[Tensor, ...] = self._copy(*inputs)
        return outputs

    def _error(self, eager: Tensor, wide: Tensor, path: str) -> float:
        if not computable(eager) or not eager.numel():
            return 0.0
        # What overflows in eager's dtype is no error of eager's, where the wider one says so, too.
        error = relative_error(torch.where(eager.isfinite(), wide, eager), eager)
        assert self.own is not None  # noqa: S101
        if not error <= trusted_error(self.own):
            msg = f"eager's {path!r} differs by a share of {error:.2g}, more than rounding does"
            raise NotFollowedError(msg)
        return error


def _lacking(eager: Tensor, wide: Tensor, path: str) -> Tensor | None:
    if eager.shape != wide.shape:
        msg = f"{path!r} has the shape {tuple(wide.shape)} instead of {tuple(eager.shape)}"
        raise NotFollowedError(msg)
    if not computable(eager):
        # Types of 8 bits are stored only, and are what a module rounds on purpose.
        if not eager.is_floating_point() and not torch.equal(eager, wide):
            msg = f"{path!r} is not equal, in {dtype_name(eager.dtype)}"
            raise NotFollowedError(msg)
        return None
    if not same_places(eager, wide.to(eager.dtype)):
        msg = f"NaN or infinity are elsewhere in {path!r}"
        raise NotFollowedError(msg)
    exact = torch.complex128 if eager.is_complex() else torch.float64
    lacking = (wide.detach().to(exact) - eager.detach().to(exact)).nan_to_num(0.0, 0.0, 0.0)
    if not lacking.any():
        return None
    # A small number, of which few digits are enough.
    return lacking.to(torch.complex64 if eager.is_complex() else torch.bfloat16)
