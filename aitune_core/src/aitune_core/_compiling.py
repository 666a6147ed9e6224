"""Compiling a graph with torch.export and Inductor: one program for all sizes in the ranges.

This is what ``torch.compile`` does, without what it does at each call. Its guards look at state of
the process (grad mode, autocast, threads, flags) and compile again where that is another; its
programs are kept per code object, in a limited number, until anybody resets them. A program that
is made here is called directly: nothing can compile again, the engine alone owns it, and what it
takes for granted of sizes is known when it is built.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor, fx, nn

from aitune_core._quiet import quiet_compilers
from aitune_core.backend import BuildRequest
from aitune_core.conditions import SizeCondition
from aitune_core.errors import BuildError
from aitune_core.specs import DynamicDim, GraphSpec, TensorSpec

__all__ = ["Program", "assumptions", "compile_program"]

_NAME: Final = "inductor"
#: Sizes of 0 and 1 are constants to a tracer.
_SMALLEST_FREE: Final = 2
_MAX_LINES: Final = 3
_MAX_LENGTH: Final = 500


@attrs.frozen
class Program:
    """A compiled graph.

    Attributes:
        function: Takes the sizes in ``places``, then contiguous tensors; returns tensors.
        places: Input and axis of each size that the function takes.
        state: The module that holds the weights, which are those of the user's module.
        conditions: What was taken for granted of sizes.
    """

    function: Callable[..., Sequence[Tensor]]
    places: tuple[tuple[int, int], ...]
    state: nn.Module
    conditions: tuple[SizeCondition, ...]

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run on flat inputs of any strides."""
        sizes = [inputs[place].shape[axis] for place, axis in self.places]
        return self.function(*sizes, *map(_plain, inputs))


def _plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in the layout that the program was compiled for."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def compile_program(request: BuildRequest, options: Mapping[str, Any]) -> Program:
    """Compile the request's module for all sizes of its graph.

    Args:
        request: Module, graph and inputs.
        options: Inductor's options.

    Raises:
        BuildError: The module cannot be followed or compiled; the cause is PyTorch's error.
    """
    with _compiling(request.device):
        exported = _exported(request)
        with _step("compile", request.graph):
            return _compiled(exported, request.graph, options)


def assumptions(request: BuildRequest, inputs: Sequence[Tensor]) -> tuple[SizeCondition, ...]:
    """Return what the request's module takes for granted of the sizes of inputs.

    Raises:
        Exception: Of any kind, where the module cannot be followed.
    """
    from aitune_core.symbolic import symbolic_conditions  # noqa: PLC0415 - heavy

    with _compiling(request.device):
        program = _export(request, inputs)
        return symbolic_conditions(_values(_inputs(program)), request.graph)


@contextlib.contextmanager
def _compiling(device: torch.device) -> Iterator[None]:
    """Prepare PyTorch for a compilation in this thread, one at a time in the process."""
    with quiet_compilers():  # PyTorch warns of itself when this is imported
        from torch._dynamo.convert_frame import compile_lock  # noqa: PLC0415 - heavy

    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with (
            compile_lock,
            quiet_compilers(),
            on_device,
            torch.inference_mode(mode=False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        # What was traced stays in cycles, and with it the module and the frames of all callers.
        gc.collect()


@contextlib.contextmanager
def _step(step: str, graph: GraphSpec) -> Iterator[None]:
    """Turn what PyTorch raises, which is of every kind, into an error that names the step."""
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        msg = (
            f"torch.compile failed at step {step!r} for graph {graph.name!r}: {_telling(error)}; "
            "the cause holds the whole text"
        )
        raise BuildError(msg, backend_name=_NAME, step=step) from error


def _telling(error: Exception) -> str:
    """Return type and first lines of an error whose text may have hundreds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:_MAX_LINES])}"[:_MAX_LENGTH]


def _exported(request: BuildRequest) -> fx.GraphModule:
    """Export at sizes that leave most axes free; where the module refuses them, at recorded ones.

    Raises:
        BuildError: It refuses those, too.
    """
    graph = request.graph
    inputs = _trace_inputs(request)
    try:
        return _export(request, inputs)
    except Exception:  # noqa: BLE001 - the user's module may raise anything at unseen sizes
        recorded = max(
            request.samples,
            key=lambda sample: sum(
                size >= _SMALLEST_FREE for size in graph.dim_sizes(sample).values()
            ),
        )
    with _step("export", graph):
        return _export(request, recorded)


def _trace_inputs(request: BuildRequest) -> tuple[Tensor, ...]:
    graph = request.graph
    taken = {size for spec in graph.inputs for size in spec.shape if isinstance(size, int)}
    sizes: dict[str, int] = {}
    for name, dim in graph.dims.items():
        wanted = max(dim.min if dim.opt is None else dim.opt, min(_SMALLEST_FREE, dim.max))
        nearby = (wanted + sign * step for step in range(len(taken) + 1) for sign in (1, -1))
        lowest = max(dim.min, min(_SMALLEST_FREE, dim.max))
        sizes[name] = next(
            (size for size in nearby if lowest <= size <= dim.max and size not in taken), wanted
        )
        taken.add(sizes[name])
    return request.inputs_at(graph.completed_sizes(sizes) or sizes)


def _export(request: BuildRequest, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Return the module's operators as a graph on flat tensors, which holds the weights."""
    shapes = tuple(_free_axes(spec) for spec in request.graph.inputs)
    program = torch.export.export(
        request.module,
        # Fresh tensors: marks about free axes stay on those that an export gets.
        tuple(tensor.detach().clone().contiguous() for tensor in inputs),
        # One entry: forward(self, *inputs) has one parameter, which holds all tensors.
        dynamic_shapes=(shapes,),
        strict=False,
    )
    # The graph's own checks take the place of those that newer releases put into the module.
    unchecked = inspect.signature(program.module).parameters.keys() & {"check_guards"}
    exported = program.module(**dict.fromkeys(unchecked, False))
    # Takes and returns flat tensors, so that what packs and unpacks them is not needed.
    graph = exported.graph
    graph.set_codegen(fx.graph.CodeGen())
    for owner in tuple(exported.modules()):
        for name, weight in tuple(owner._parameters.items()):  # noqa: SLF001
            if weight is not None:
                # The same memory, but not moved along where the module moves to another device.
                delattr(owner, name)
                owner.register_buffer(name, weight.detach())
        for name, buffer in tuple(owner._buffers.items()):  # noqa: SLF001
            if buffer is not None:
                owner._buffers[name] = buffer.detach()  # noqa: SLF001
    return fx.GraphModule(exported, graph)


def _free_axes(spec: TensorSpec) -> dict[int, Any]:
    hint = torch.export.Dim
    return {
        axis: hint.AUTO(min=size.min, max=size.max)
        if isinstance(size, DynamicDim) and size.min < size.max
        else hint.STATIC
        for axis, size in enumerate(spec.shape)
    }


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _values(nodes: Sequence[fx.Node]) -> list[Any]:
    return [node.meta["val"] for node in nodes]


def _compiled(module: fx.GraphModule, graph: GraphSpec, options: Mapping[str, Any]) -> Program:
    import torch._inductor  # noqa: PLC0415 - heavy
    from torch._guards import TracingContext, tracing  # noqa: PLC0415

    from aitune_core.symbolic import symbolic_conditions  # noqa: PLC0415

    nodes = _inputs(module)
    tensors = _values(nodes)
    places = _size_places(tensors)
    sizes = [tensors[place].shape[axis] for place, axis in places]
    # As numbers, which is how CUDA graphs of several sizes are told apart.
    with module.graph.inserting_before(nodes[0] if nodes else None):
        for (place, axis), size in zip(places, sizes, strict=True):
            module.graph.placeholder(f"size_{place}_{axis}").meta["val"] = size
    module.recompile()
    # Without this entry, weights would be copied at each replay of a CUDA graph.
    module.meta["dynamo_compile_id"] = None
    mode = next((tensor.fake_mode for tensor in tensors), None)
    with tracing(TracingContext(mode)):
        function = torch._inductor.compile(module, [*sizes, *tensors], dict(options))  # noqa: SLF001
    # Only now: compiling takes more for granted than the module's code does.
    return Program(function, places, module, symbolic_conditions(tensors, graph))


def _size_places(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return input and axis of each size that is free, once."""
    found: dict[Any, tuple[int, int]] = {}
    for place, tensor in enumerate(tensors):
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found.setdefault(size.node.expr, (place, axis))
    return tuple(found.values())
