"""Modules in half precision: a copy is cast, and inputs and outputs keep the caller's types."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aitune_backend_onnxruntime.errors import BACKEND_NAME
from aitune_core.errors import BuildError, ConfigError

if TYPE_CHECKING:
    from aitune_backend_onnxruntime.config import Precision
    from aitune_core.backend import BuildRequest
    from aitune_core.specs import GraphSpec

__all__ = ["first_overflow", "lowered"]


class _Cast(nn.Module):
    """A flat module that computes in half precision between casts."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, graph: GraphSpec) -> None:
        super().__init__()
        self.module = module
        self.training = False
        self._dtype = dtype
        self._results = tuple(spec.dtype for spec in graph.outputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run on inputs of the caller's types; returns outputs of the types of the graph."""
        outputs = self.module(*_changed(inputs, torch.float32, self._dtype))
        return tuple(
            output.to(wanted) if output.dtype is self._dtype else output
            for output, wanted in zip(outputs, self._results, strict=True)
        )


def lowered(
    request: BuildRequest, precision: Precision, float32_parts: Collection[str]
) -> BuildRequest:
    """Return a request for the module in half precision; the module itself stays as it is.

    Parameters and buffers of float32 are cast; other types stay, and so do those of parts that are
    to compute in float32, between casts of their own.

    Args:
        request: What to build.
        precision: The precision.
        float32_parts: Names of parts of the module that stay in float32.

    Raises:
        ConfigError: The module has no part of such a name.
        BuildError: The module cannot be copied.
    """
    kept = {name: _part(request.module, name) for name in float32_parts}
    exact = {id(tensor) for part in kept.values() for tensor in _tensors(part)}
    # What is in the memo is taken as the copy. Tensors that stay are shared: nobody writes to them.
    memo: dict[int, Any] = {
        id(tensor): tensor if id(tensor) in exact else _half(tensor, precision.dtype)
        for tensor in _tensors(request.module)
    }
    try:
        module = copy.deepcopy(request.module, memo)
    except Exception as error:  # whatever a user's class raises
        msg = f"precision={precision.value!r} needs a copy of the module, which fails: {error}"
        raise BuildError(msg, backend_name=BACKEND_NAME, step="precision") from error
    for part in kept.values():
        _keep_exact(memo[id(part)], precision.dtype)
    return attrs.evolve(request, module=_Cast(module, precision.dtype, request.graph))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _half(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is not torch.float32:
        return tensor
    cast = tensor.detach().to(dtype)
    return nn.Parameter(cast, requires_grad=False) if isinstance(tensor, nn.Parameter) else cast


def _part(flat: nn.Module, name: str) -> nn.Module:
    """Return a part by its name in the user's module, which the flat module holds."""
    parts: dict[str, nn.Module] = dict(flat.named_modules())
    for full in (f"module.{name}", name):
        if name and full in parts:
            return parts[full]
    known = [full.removeprefix("module.") for full in parts if full.startswith("module.")]
    near = difflib.get_close_matches(name, known) or known[:5]
    msg = f"float32_parts names {name!r}, which is no part of the module; parts are {near}"
    raise ConfigError(msg, field="float32_parts", value=name, allowed=near)


def _keep_exact(part: nn.Module, dtype: torch.dtype) -> None:
    """Put casts around a part that computes in float32."""
    part.register_forward_pre_hook(
        lambda _, args, kwargs: (
            _changed(args, dtype, torch.float32),
            _changed(kwargs, dtype, torch.float32),
        ),
        with_kwargs=True,
    )
    part.register_forward_hook(lambda _, __, result: _changed(result, torch.float32, dtype))


def _changed(value: Any, old: torch.dtype, new: torch.dtype) -> Any:  # noqa: ANN401
    """Return a value with its tensors of one type cast to another."""
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to(new) if tensor.dtype is old else tensor, value
    )


def first_overflow(request: BuildRequest) -> str | None:
    """Return the name of the first part whose results are not finite though its inputs are.

    Args:
        request: A request that `lowered` returned.
    """
    found: list[str] = []
    names = {
        part: name.removeprefix("module.module.")
        for name, part in request.module.named_modules()
        if name.startswith("module.module.") and not list(part.children())
    }

    def look(part: nn.Module, args: tuple[Any, ...], result: object) -> None:
        if not found and _finite(args) and not _finite(result):
            found.append(names[part])

    hooks = [part.register_forward_hook(look) for part in names]
    try:
        with torch.no_grad():
            for sample in request.samples:
                request.module(*sample)
    except Exception:  # noqa: BLE001 - it is only for advice, and eager may lack half precision
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _finite(value: object) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return all(bool(leaf.isfinite().all()) for leaf in tensors if leaf.is_floating_point())
