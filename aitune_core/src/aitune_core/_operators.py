"""A look at the operators that run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Look", "look_at_operators"]

#: Gets an operator, its arguments by position and by name, and its result.
Look: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]


def look_at_operators(run: Callable[[], object], look: Look) -> None:
    """Show each operator of a run to a function; what the run raises passes."""
    with _Looking(look):
        run()


class _Looking(TorchDispatchMode):
    def __init__(self, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's operators have no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._look(func, args, kwargs, result)
        return result
