"""Specs: what a graph accepts and returns, independent of any backend."""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from attrs import field, validators
from torch import Tensor

from aitune_core._trees import Structure
from aitune_core.conditions import FUNCTION_NAMES, SizeCondition
from aitune_core.errors import ConfigError, InputMismatchError

__all__ = ["BatchDim", "DynamicDim", "GraphSpec", "TensorSpec", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def _name_problem(name: object) -> str | None:
    """Return why conditions cannot speak of a dim of this name; None where they can."""
    if not (isinstance(name, str) and name.isidentifier()):
        return "must be a Python identifier"
    if keyword.iskeyword(name):
        return "must be no keyword of Python"
    if name in FUNCTION_NAMES:
        return "must be none of the functions of conditions"
    # Python reads names in this form.
    normal = unicodedata.normalize("NFKC", name)
    return None if name == normal else f"must be written as Python reads it, {normal!r}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@attrs.frozen(init=False)
class DynamicDim:
    """A named axis whose size may change from call to call.

    Axes with the same name have the same size in every call.

    Args:
        name: Identifier of the dim; a Python identifier that is no keyword, nor a function of
            `SizeCondition` such as ``max``.
        min: Smallest size, inclusive; at least 0.
        max: Largest size, inclusive.
        opt: Size to optimise for; None means the size seen most often when recording.

    Raises:
        ConfigError: The name cannot be used, a size is no integer, or not
            ``min <= opt <= max``.
    """

    name: str
    min: int
    max: int
    opt: int | None = None

    def __init__(self, name: str, min: int, max: int, opt: int | None = None) -> None:  # noqa: A002
        problem = _name_problem(name)
        if problem is not None:
            msg = f"DynamicDim name {problem}, got {name!r}; use another name, such as 'length'"
            raise ConfigError(msg, field="name", value=name, allowed="an identifier")
        for label, size in (("min", min), ("max", max), ("opt", min if opt is None else opt)):
            if not _is_size(size):
                msg = f"DynamicDim {name!r}: {label} must be an integer >= 0, got {size!r}"
                raise ConfigError(msg, field=label, value=size, allowed="an integer >= 0")
        if max < min or not min <= (min if opt is None else opt) <= max:
            msg = (
                f"DynamicDim {name!r} needs min <= opt <= max, got min={min}, opt={opt}, max={max}"
            )
            raise ConfigError(msg, field="max", value=(min, opt, max), allowed="min <= opt <= max")
        self.__attrs_init__(name, min, max, opt)

    def __str__(self) -> str:
        """Return ``name[min..max]``."""
        return f"{self.name}[{self.min}..{self.max}]"


@attrs.frozen(init=False)
class BatchDim(DynamicDim):
    """The axis along which samples are stacked.

    Args:
        min: Smallest batch, inclusive.
        max: Largest batch, inclusive.
        opt: Batch to optimise for; None means the batch seen most often when recording.
        name: Identifier of the dim.
    """

    def __init__(
        self,
        min: int = 1,  # noqa: A002
        max: int = 1,  # noqa: A002
        opt: int | None = None,
        *,
        name: str = "batch",
    ) -> None:
        if _is_size(min) and max == 1 < min:
            msg = (
                f"BatchDim {name!r} starts at {min} and ends at 1, which is the default of max; "
                f"give both, such as BatchDim(1, {min})"
            )
            raise ConfigError(msg, field="max", value=(min, opt, max), allowed="min <= opt <= max")
        super().__init__(name, min, max, opt)


@attrs.frozen(kw_only=True)
class TensorSpec:
    """One tensor of a graph.

    Attributes:
        name: Generated name, unique within the graph; safe as an ONNX value name.
        path: Where the tensor sits in the call or the result, such as ``"inputs['ids']"``.
        dtype: Element type.
        shape: One entry per axis: a static size, or the dim that the axis follows.
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    name: str
    path: str
    dtype: torch.dtype = field(validator=validators.instance_of(torch.dtype))
    shape: tuple[int | DynamicDim, ...]
    device_type: str = "cpu"

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dynamic_axes(self) -> dict[int, DynamicDim]:
        """The axes that are not static, by position."""
        return {axis: size for axis, size in enumerate(self.shape) if isinstance(size, DynamicDim)}

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...] | None:
        """Return the concrete shape for given dim sizes, or None where a dim is not given."""
        sizes = tuple(
            dims.get(size.name, -1) if isinstance(size, DynamicDim) else size for size in self.shape
        )
        return None if -1 in sizes else sizes

    def __str__(self) -> str:
        """Return ``path: dtype(shape) on device``."""
        shape = ", ".join(str(size) for size in self.shape)
        return f"{self.path}: {dtype_name(self.dtype)}({shape}) on {self.device_type}"


@attrs.frozen(kw_only=True)
class GraphSpec:
    """One calling form of a module: the frozen record that an engine is built for.

    Attributes:
        name: Name of the graph, unique within its module.
        inputs: The tensors of a call, in flat order.
        outputs: The tensors that an engine returns, in flat order: those of the result first,
            then the final value of each input that the module changes in place.
        call_structure: Structure of the call, one child per parameter of ``forward``.
        result_structure: Structure of the result.
        mutated_inputs: Indices of the inputs that the module changes in place.
        conditions: What the sizes of the dims must meet besides their ranges.

    Raises:
        ConfigError: A condition names a dim that no input has.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call_structure: tuple[Structure, ...]
    result_structure: Structure
    mutated_inputs: tuple[int, ...] = ()
    conditions: tuple[SizeCondition, ...] = ()

    def __attrs_post_init__(self) -> None:
        known = self.dims if self.conditions else {}
        for condition in self.conditions:
            unknown = sorted(condition.dims - set(known))
            if unknown:
                msg = (
                    f"condition '{condition}' of graph {self.name!r} names {unknown[0]!r}, its "
                    f"dims are {sorted(known)}"
                )
                raise ConfigError(msg, field="conditions", value=condition, allowed=sorted(known))

    @property
    def dims(self) -> dict[str, DynamicDim]:
        """The dims of the inputs, by name, in order of appearance."""
        return {dim.name: dim for spec in self.inputs for dim in spec.dynamic_axes.values()}

    @property
    def result_count(self) -> int:
        """Number of outputs that belong to the result."""
        return len(self.outputs) - len(self.mutated_inputs)

    def dim_sizes(self, inputs: Sequence[Tensor]) -> dict[str, int]:
        """Return the size of each dim in ``inputs``, without checking them."""
        return {
            dim.name: tensor.shape[axis]
            for spec, tensor in zip(self.inputs, inputs, strict=True)
            for axis, dim in spec.dynamic_axes.items()
        }

    def completed_sizes(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """Return sizes with those of dims that a condition defines by others set to what it says.

        Args:
            sizes: A size for each dim.

        Returns:
            None where the sizes leave the range of a dim or do not meet a condition.
        """
        complete = dict(sizes)
        try:
            for condition in self.conditions:
                if condition.defined is not None:
                    complete[condition.defined] = condition.defined_size(complete)
        except ValueError:
            return None
        inside = all(dim.min <= complete[name] <= dim.max for name, dim in self.dims.items())
        return complete if inside and self.broken_condition(complete) is None else None

    def broken_condition(self, sizes: Mapping[str, int]) -> SizeCondition | None:
        """Return the first condition that the sizes of all dims do not meet."""
        return next((one for one in self.conditions if not one.holds(sizes)), None)

    def check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Check that flat inputs fit this graph.

        Args:
            inputs: One tensor per entry of ``inputs``, in order.

        Raises:
            InputMismatchError: The count, a dtype, rank, size or device kind does not fit, or
                the sizes do not meet a condition.
        """
        if len(inputs) != len(self.inputs):
            msg = f"graph {self.name!r} takes {len(self.inputs)} tensors, got {len(inputs)}"
            raise InputMismatchError(msg, expected=len(self.inputs), got=len(inputs))
        sizes: dict[str, tuple[int, str]] = {}
        for spec, tensor in zip(self.inputs, inputs, strict=True):
            _check_tensor(spec, tensor)
            for axis, expected in enumerate(spec.shape):
                _check_size(spec, axis, expected, tensor.shape[axis], sizes)
        if self.conditions:
            self._check_conditions({name: size for name, (size, _) in sizes.items()}, sizes)

    def _check_conditions(
        self, sizes: Mapping[str, int], seen: Mapping[str, tuple[int, str]]
    ) -> None:
        broken = self.broken_condition(sizes)
        if broken is None:
            return
        dims = sorted(broken.dims)
        got = ", ".join(f"{name} is {sizes[name]} ({seen[name][1]})" for name in dims)
        msg = f"the tuned graph takes sizes with {broken}; here {got}"
        path = next(spec.path for spec in self.inputs if dims[0] in _dim_names(spec))
        raise InputMismatchError(
            msg, path=path, expected=broken.text, got={name: sizes[name] for name in dims}
        )


def _dim_names(spec: TensorSpec) -> set[str]:
    return {dim.name for dim in spec.dynamic_axes.values()}


def _check_tensor(spec: TensorSpec, tensor: Tensor) -> None:
    facts: tuple[tuple[str, Any, Any], ...] = (
        ("dtype", dtype_name(spec.dtype), dtype_name(tensor.dtype)),
        ("rank", spec.rank, tensor.dim()),
        ("device", spec.device_type, tensor.device.type),
    )
    for what, expected, got in facts:
        if expected != got:
            msg = f"input {spec.path!r} has {what} {got}, the tuned graph takes {expected}"
            raise InputMismatchError(msg, path=spec.path, expected=expected, got=got)


def _check_size(
    spec: TensorSpec,
    axis: int,
    expected: int | DynamicDim,
    got: int,
    seen: dict[str, tuple[int, str]],
) -> None:
    where = f"input {spec.path!r} axis {axis}"
    if not isinstance(expected, DynamicDim):
        if got != expected:
            msg = f"{where} has size {got}, the tuned graph takes {expected}"
            raise InputMismatchError(msg, path=spec.path, expected=expected, got=got)
        return
    if not expected.min <= got <= expected.max:
        msg = (
            f"{where} has size {got}, the tuned range of {expected.name!r} is {expected.min} to "
            f"{expected.max}"
        )
        raise InputMismatchError(msg, path=spec.path, expected=str(expected), got=got)
    first, first_where = seen.setdefault(expected.name, (got, where))
    if got != first:
        msg = (
            f"{where} has size {got}, but {first_where} has {first}; both are dim {expected.name!r}"
        )
        raise InputMismatchError(msg, path=spec.path, expected=first, got=got)
