"""Indexing that the trace exporter translates wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

__all__ = ["untraceable_indexing"]

_ADDS: Final = frozenset({"index_add", "index_add_"})
_PUTS: Final = frozenset({"index_put", "index_put_", "_index_put_impl_"})


def untraceable_indexing(module: nn.Module, inputs: Sequence[Tensor]) -> str | None:
    """Say what in a module a trace would get wrong for other indices; None where nothing.

    Sums over equal indices keep one of them only, and indexing with several tensors takes other
    elements for negative indices. Which indices come cannot be known.

    Args:
        module: It runs once.
        inputs: Its inputs; copies of them are used.
    """
    looking = _Indexing()
    with torch.no_grad(), looking:
        module(*(tensor.clone() for tensor in inputs))
    return looking.fault


class _Indexing(TorchDispatchMode):
    """Looks at each operator that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fault: str | None = None

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's operators have no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        adds = name in _ADDS
        if name in _PUTS:
            adds = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))  # noqa: PLR2004
        if adds:
            self.fault = f"{name}, whose sums over equal indices a trace loses"
        if name == "index" or name in _PUTS:
            indices = [index for index in args[1] if index is not None]
            if len(indices) > 1:
                self.fault = f"{name} with several tensors, where a trace mistakes negative indices"
        return func(*args, **kwargs)
