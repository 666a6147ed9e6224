"""From recorded calls to a graph spec: which axes are dynamic, and which move together."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from aitune_core._calls import CallForm
from aitune_core._flat import FlatModule
from aitune_core._recording import ModuleRecording, RecordedCall
from aitune_core._relations import related_dims
from aitune_core._scalars import scalar_kinds
from aitune_core._synthesis import distinct_sizes, probe_sizes, resize_inputs
from aitune_core._trees import hole_paths
from aitune_core.errors import ConfigError, InputMismatchError
from aitune_core.specs import BatchDim, DynamicDim, GraphSpec, TensorSpec

__all__ = ["Axes", "DynamicShapes", "RecordedGraph", "check_dynamic_shapes", "recorded_graphs"]

#: Explicit dims of one input: axis -> dim, or a sequence with one entry per axis.
Axes: TypeAlias = Mapping[int, DynamicDim | int | None] | Sequence[DynamicDim | int | None]
#: Explicit dims, by forward-parameter path.
DynamicShapes: TypeAlias = Mapping[str, Axes]
_Sizes: TypeAlias = tuple[int, ...]


@attrs.frozen
class RecordedGraph:
    """A graph with what it was recorded from.

    Attributes:
        spec: The graph.
        samples: Flat inputs of each recorded call.
        results: Tensors in the result of each recorded call.
        module: The module.
        call_form: Its signature.
        declared: Names of the dims whose ranges the user gave.
        by_value: Where numbers that change are inputs: the graphs with these numbers by value,
            for backends or modules that cannot take them as tensors.
    """

    spec: GraphSpec
    samples: tuple[tuple[torch.Tensor, ...], ...]
    results: tuple[tuple[torch.Tensor, ...], ...]
    module: torch.nn.Module
    call_form: CallForm
    declared: frozenset[str] = frozenset()
    by_value: tuple[RecordedGraph, ...] = ()

    @functools.cached_property
    def flat_module(self) -> FlatModule:
        """The module on flat tensors, for backends."""
        return FlatModule(self.module, self.call_form, self.spec)

    @functools.cached_property
    def reference(self) -> FlatModule:
        """The eager module on flat tensors, with numbers as users give them."""
        return FlatModule(self.module, self.call_form, self.spec, numbers=True)

    def arguments(self, sample: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` of a call with copies of a sample's tensors."""
        copies: list[Any] = [tensor.clone() for tensor in sample]
        for index, kind in scalar_kinds(self.spec.call_structure).items():
            copies[index] = kind(sample[index].item())
        return self.call_form.arguments(self.spec.call_structure, copies)


def recorded_graphs(
    recording: ModuleRecording, dynamic_shapes: DynamicShapes | None
) -> list[RecordedGraph]:
    """Return the graphs of a recording.

    Raises:
        ConfigError: ``dynamic_shapes`` names an unknown path or axis, or a recorded size lies
            outside its dim.
        RecordingError: The module cannot be tuned.
    """
    if recording.problem is not None:
        raise recording.problem
    groups = recording.groups()
    explicit = _Explicit(dynamic_shapes or {})
    graphs = []
    for position, group in enumerate(groups):
        name = f"graph_{position}"
        alternatives = tuple(
            _graph(f"{name}_{value}", calls, recording, explicit)
            for value, calls in enumerate(group.by_value)
        )
        graph = _graph(name, group.calls, recording, explicit)
        graphs.append(attrs.evolve(graph, by_value=alternatives))
    explicit.check_used(recording.name)
    return graphs


def _graph(
    name: str, calls: Sequence[RecordedCall], recording: ModuleRecording, explicit: _Explicit
) -> RecordedGraph:
    first, form = calls[0], recording.call_form
    paths = form.leaf_paths(first.call_structure)
    shapes = _input_shapes(paths, calls, explicit)
    inputs = tuple(
        TensorSpec(
            name=f"input_{index}",
            path=path,
            dtype=tensor.dtype,
            shape=shape,
            device_type=tensor.device.type,
        )
        for index, (path, tensor, shape) in enumerate(zip(paths, first.inputs, shapes, strict=True))
    )
    mutated = tuple(sorted(set().union(*(call.mutated_inputs for call in calls))))
    draft = GraphSpec(
        name=name,
        inputs=inputs,
        outputs=(),
        call_structure=first.call_structure,
        result_structure=first.result_structure,
        mutated_inputs=mutated,
    )
    samples = tuple(call.inputs for call in calls)
    _check_samples(draft, samples)
    draft = related_dims(
        draft,
        [draft.dim_sizes(sample) for sample in samples],
        explicit.names,
        lambda graph: all(
            _probe(graph, calls, recording.module, form, sizes) for sizes in probe_sizes(graph)
        ),
    )
    outputs = _outputs(draft, calls, recording.module, form)
    spec = attrs.evolve(draft, outputs=outputs)
    results = tuple(call.outputs for call in calls)
    return RecordedGraph(spec, samples, results, recording.module, form, explicit.names)


def _check_samples(draft: GraphSpec, samples: Sequence[Sequence[torch.Tensor]]) -> None:
    for sample in samples:
        try:
            draft.check_inputs(sample)
        except InputMismatchError as error:
            msg = f"dynamic_shapes contradicts a recorded call: {error}"
            raise ConfigError(
                msg, field="dynamic_shapes", value=error.got, allowed=error.expected
            ) from error


def _outputs(
    draft: GraphSpec, calls: Sequence[RecordedCall], module: torch.nn.Module, form: CallForm
) -> tuple[TensorSpec, ...]:
    """Specs of the outputs: an axis follows a dim where it had that dim's size in every call."""
    dim_sizes = [draft.dim_sizes(call.inputs) for call in calls]
    shapes = [call.output_shapes for call in calls]
    if draft.dims:
        sizes = distinct_sizes(draft)
        probed = _probe(draft, calls, module, form, sizes)
        if probed is not None:
            dim_sizes.append(sizes)
            shapes.append(probed)
    vectors = {name: tuple(sizes[name] for sizes in dim_sizes) for name in draft.dims}
    paths = hole_paths(draft.result_structure, "out")
    results = tuple(
        TensorSpec(
            name=f"output_{index}",
            path=path,
            dtype=dtype,
            shape=tuple(
                _output_axis(
                    f"output_{index}_{axis}",
                    tuple(shape[index][axis] for shape in shapes),
                    vectors,
                    draft.dims,
                )
                for axis in range(len(calls[0].output_shapes[index]))
            ),
            device_type=calls[0].output_devices[index],
        )
        for index, (path, dtype) in enumerate(zip(paths, calls[0].output_dtypes, strict=True))
    )
    changed = tuple(
        attrs.evolve(draft.inputs[index], name=f"changed_{index}") for index in draft.mutated_inputs
    )
    return results + changed


def _probe(
    draft: GraphSpec,
    calls: Sequence[RecordedCall],
    module: torch.nn.Module,
    form: CallForm,
    sizes: Mapping[str, int],
) -> tuple[_Sizes, ...] | None:
    """Output shapes at sizes nobody recorded; None where the module does not take them."""
    inputs = resize_inputs(draft, [call.inputs for call in calls], sizes)
    try:
        with torch.no_grad():
            outputs = FlatModule(module, form, draft, numbers=True)(*inputs)
    except Exception:  # noqa: BLE001 - the module may refuse sizes that nobody called it with
        return None
    shapes = tuple(tuple(output.shape) for output in outputs[: len(calls[0].output_shapes)])
    ranks = [len(shape) for shape in shapes]
    return shapes if ranks == [len(shape) for shape in calls[0].output_shapes] else None


def _output_axis(
    name: str,
    sizes: _Sizes,
    vectors: Mapping[str, _Sizes],
    dims: Mapping[str, DynamicDim],
) -> int | DynamicDim:
    if len(set(sizes)) == 1:
        return sizes[0]
    for dim_name, vector in vectors.items():
        if vector == sizes:
            return dims[dim_name]
    return DynamicDim(name, min(sizes), max(sizes))


class _Explicit:
    """The user's dims, by path and axis."""

    def __init__(self, shapes: DynamicShapes) -> None:
        self._by_path = {path: _axes(path, axes) for path, axes in shapes.items()}
        self._used: set[str] = set()
        self._paths: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """Names of the dims."""
        return frozenset(
            dim.name
            for axes in self._by_path.values()
            for dim in axes.values()
            if isinstance(dim, DynamicDim)
        )

    def dim(self, path: str, axis: int, rank: int) -> DynamicDim | int | None:
        self._paths.add(path)
        axes = self._by_path.get(path)
        if axes is None:
            return None
        self._used.add(path)
        for position in axes:
            if not -rank <= position < rank:
                msg = f"dynamic_shapes[{path!r}] names axis {position}, the input has {rank} axes"
                raise ConfigError(
                    msg, field=f"dynamic_shapes[{path!r}]", value=position, allowed=rank
                )
        return axes.get(axis, axes.get(axis - rank))

    def check_used(self, module_name: str) -> None:
        unused = sorted(set(self._by_path) - self._used)
        if unused:
            msg = (
                f"dynamic_shapes names {unused[0]!r}, which no recorded call of {module_name!r} "
                f"has as a tensor input; its tensor inputs are {sorted(self._paths)}"
            )
            raise ConfigError(
                msg, field="dynamic_shapes", value=unused[0], allowed=tuple(sorted(self._paths))
            )


def _usable_axis(axis: object, dim: object) -> bool:
    sized = isinstance(dim, DynamicDim | int) and not isinstance(dim, bool)
    return isinstance(axis, int) and (dim is None or sized)


def _axes(path: str, axes: Axes) -> dict[int, DynamicDim | int | None]:
    pairs = dict(axes) if isinstance(axes, Mapping) else dict(enumerate(axes))
    for axis, dim in pairs.items():
        if not _usable_axis(axis, dim):
            msg = (
                f"dynamic_shapes[{path!r}] must map axis numbers to DynamicDim, BatchDim, a static "
                f"size or None, got {axis!r}: {dim!r}"
            )
            raise ConfigError(
                msg, field=f"dynamic_shapes[{path!r}]", value=dim, allowed="DynamicDim, int or None"
            )
    return pairs


def check_dynamic_shapes(shapes: object) -> None:
    """Check the form of ``dynamic_shapes`` and that a name stands for one range.

    Raises:
        ConfigError: It is no mapping of paths, or one name has two ranges.
    """
    if not isinstance(shapes, Mapping) or not all(isinstance(path, str) for path in shapes):
        msg = f"dynamic_shapes must map parameter paths to axes, got {shapes!r}"
        raise ConfigError(msg, field="dynamic_shapes", value=shapes, allowed="a mapping")
    ranges: dict[str, DynamicDim] = {}
    for path, axes in shapes.items():
        if not isinstance(axes, Mapping | Sequence) or isinstance(axes, str):
            msg = f"dynamic_shapes[{path!r}] must be a mapping or sequence of axes, got {axes!r}"
            raise ConfigError(msg, field=f"dynamic_shapes[{path!r}]", value=axes, allowed="axes")
        for dim in _axes(path, axes).values():
            if isinstance(dim, DynamicDim):
                first = ranges.setdefault(dim.name, dim)
                if (first.min, first.max, first.opt) != (dim.min, dim.max, dim.opt):
                    msg = (
                        f"dim {dim.name!r} has two ranges, {first} and {dim}; one name is one size"
                    )
                    raise ConfigError(msg, field="dynamic_shapes", value=dim, allowed=str(first))


def _input_shapes(
    paths: Sequence[str], calls: Sequence[RecordedCall], explicit: _Explicit
) -> list[tuple[int | DynamicDim, ...]]:
    """Shapes of the inputs: static where the size never changed, else dims.

    Axes that had equal, changing sizes in every call share one dim.
    """
    by_sizes: dict[_Sizes, DynamicDim] = {}
    vectors = [
        [tuple(call.inputs[index].shape[axis] for call in calls) for axis in range(tensor.dim())]
        for index, tensor in enumerate(calls[0].inputs)
    ]
    given = [
        [_given(path, axis, sizes, len(axes), explicit) for axis, sizes in enumerate(axes)]
        for path, axes in zip(paths, vectors, strict=True)
    ]
    names = {dim.name for row in given for dim in row if isinstance(dim, DynamicDim)}
    for row, axes in zip(given, vectors, strict=True):
        for dim, sizes in zip(row, axes, strict=True):
            if isinstance(dim, DynamicDim) and len(set(sizes)) > 1:
                by_sizes.setdefault(sizes, dim)
    shapes = []
    for path, row, axes in zip(paths, given, vectors, strict=True):
        shape: list[int | DynamicDim] = []
        for axis, (dim, sizes) in enumerate(zip(row, axes, strict=True)):
            if dim is not None:
                shape.append(dim)
            elif len(set(sizes)) == 1:
                shape.append(sizes[0])
            else:
                if sizes not in by_sizes:
                    by_sizes[sizes] = _derived(path, axis, sizes, names)
                shape.append(by_sizes[sizes])
        shapes.append(tuple(shape))
    return shapes


def _given(
    path: str, axis: int, sizes: _Sizes, rank: int, explicit: _Explicit
) -> int | DynamicDim | None:
    dim = explicit.dim(path, axis, rank)
    if dim is None:
        return None
    lowest, highest = (dim.min, dim.max) if isinstance(dim, DynamicDim) else (dim, dim)
    for size in sizes:
        if not lowest <= size <= highest:
            msg = (
                f"dynamic_shapes gives input {path!r} axis {axis} as {dim}, but a recorded call "
                f"has size {size}; widen the range or leave out the call"
            )
            raise ConfigError(msg, field=f"dynamic_shapes[{path!r}]", value=size, allowed=str(dim))
    if isinstance(dim, DynamicDim) and dim.opt is None:
        return type(dim)(name=dim.name, min=dim.min, max=dim.max, opt=_most_common(sizes))
    return dim


def _most_common(sizes: _Sizes) -> int:
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size))


def _derived(path: str, axis: int, sizes: _Sizes, names: set[str]) -> DynamicDim:
    plain = unicodedata.normalize("NFKC", f"{path}_{axis}")
    wanted = "batch" if axis == 0 else re.sub(r"\W+", "_", plain).strip("_")
    name, count = wanted, 2
    while name in names:
        name, count = f"{wanted}_{count}", count + 1
    names.add(name)
    kind = BatchDim if name == "batch" else DynamicDim
    return kind(name=name, min=min(sizes), max=max(sizes), opt=_most_common(sizes))
