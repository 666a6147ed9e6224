"""Values of tensors that a module's Python code reads, which an export would freeze."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

__all__ = ["hidden_reads", "reads"]

#: Ways to read values that no exporter notices.
_HIDDEN: Final = frozenset(
    {
        "__array__",
        "__deepcopy__",
        "__dlpack__",
        "__format__",
        "__reduce_ex__",
        "__repr__",
        "data_ptr",
        "numpy",
        "storage",
        "untyped_storage",
    }
)
#: Ways that the dynamo exporter follows or refuses, and that a trace freezes.
_SEEN: Final = frozenset(
    {
        "__bool__",
        "__complex__",
        "__contains__",
        "__float__",
        "__index__",
        "__int__",
        "allclose",
        "equal",
        "is_nonzero",
        "item",
        "tolist",
    }
)
#: Operators whose results do not depend on the values of what they are given.
_VALUE_FREE: Final = ("empty_like", "full_like", "ones_like", "rand", "zeros_like", "new_")


def hidden_reads(module: nn.Module, inputs: Sequence[Tensor]) -> str | None:
    """Name a way in which Python code reads values and no exporter notices; None without one.

    Values that follow from the inputs count; those of weights alone are constants.

    Args:
        module: It runs once.
        inputs: Its inputs; copies of them are used.
    """
    return _read(module, inputs, _HIDDEN)


def reads(module: nn.Module, inputs: Sequence[Tensor]) -> str | None:
    """Name a way in which Python code reads values at all; arguments as `hidden_reads`."""
    return _read(module, inputs, _HIDDEN | _SEEN)


def _read(module: nn.Module, inputs: Sequence[Tensor], ways: frozenset[str]) -> str | None:
    own = [tensor.clone() for tensor in inputs]
    following = _Following(own)
    looking = _Looking(following, ways)
    with torch.no_grad(), following, looking:
        module(*own)
    return looking.found


class _Following(TorchDispatchMode):
    """Follows the values of some tensors through the operators that run.

    Args:
        tensors: Where they come from.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._followed: Any = WeakTensorKeyDictionary()
        for tensor in tensors:
            self._followed[tensor] = True

    def follows(self, values: object) -> bool:
        """Whether one of the tensors in ``values`` depends on theirs."""
        return any(tensor in self._followed for tensor in _tensors(values))

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's operators have no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        followed = self.follows((args, kwargs))
        result = func(*args, **kwargs)
        if followed and not func.overloadpacket.__name__.startswith(_VALUE_FREE):
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)  # noqa: SLF001
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in _tensors((result, written, kwargs.get("out"))):
                self._followed[tensor] = True
        return result


class _Looking(TorchFunctionMode):
    """Looks at which functions of torch Python code calls."""

    def __init__(self, following: _Following, ways: frozenset[str]) -> None:
        super().__init__()
        self._following = following
        self._ways = ways
        self.found: str | None = None

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in self._ways and self._following.follows((args, kwargs)):
            self.found = self.found or name
        return func(*args, **kwargs)


def _tensors(values: object) -> Iterator[Tensor]:
    return (value for value in pytree.tree_leaves(values) if isinstance(value, Tensor))
