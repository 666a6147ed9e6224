"""Functions of PyTorch replaced for one thread, by us and by its own exporter."""

from __future__ import annotations

import contextlib
import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.fx import _symbolic_trace
from torch.onnx._internal.exporter import _capture_strategies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["bytecode_followed_unless", "confined_to_this_thread", "replaced_here"]


@contextmanager
def replaced_here(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:  # noqa: ANN401
    """Replace a function for the calling thread; other threads get the real one.

    Args:
        owner: The module or class that has it.
        name: Its name there.
        replacement: What the calling thread gets while the block runs.
    """
    function = _here(replacement, getattr(owner, name))
    with mock.patch.object(owner, name, function, create=True):
        yield


@contextmanager
def confined_to_this_thread() -> Iterator[None]:
    """Hide from other threads what PyTorch's exporter does to the whole process.

    It replaces ``nn.Module.__call__``, which breaks scripted modules, and says that PyTorch is
    compiling, at which layers leave their fused paths.
    """
    patcher = _symbolic_trace._Patcher  # noqa: SLF001
    patch: Any = patcher.patch_method

    def patch_here(
        self: _symbolic_trace._Patcher,
        cls: type,
        name: str,
        new_fn: Callable[..., Any],
        deduplicate: bool = True,  # noqa: FBT001, FBT002 - as torch's
    ) -> None:
        patch(self, cls, name, _here(new_fn, getattr(cls, name)), deduplicate)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(patcher, "patch_method", patch_here))
        for name in ("is_compiling", "is_exporting"):
            real = getattr(torch.compiler, name)
            outside = functools.partial(bool, real())
            stack.enter_context(mock.patch.object(torch.compiler, name, _here(real, outside)))
        yield


@contextmanager
def bytecode_followed_unless(refused: Callable[[], bool]) -> Iterator[None]:
    """Keep PyTorch's exporter from following bytecode after our forms of operators refused.

    It does so where running the module fails. Of bytecode it follows NumPy, too, by tensors of its
    own, so that what a form found out with it may be lost.
    """
    strategy = _capture_strategies.TorchExportStrictStrategy
    follow: Any = strategy._capture  # noqa: SLF001

    def capture(*args: Any) -> Any:  # noqa: ANN401
        if refused():
            msg = "an operator was refused"
            raise RuntimeError(msg)
        return follow(*args)

    with replaced_here(strategy, "_capture", capture):
        yield


def _here(own: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is one in this thread, and another in all others."""
    here = threading.get_ident()

    @functools.wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        chosen = own if threading.get_ident() == here else others
        return chosen(*args, **kwargs)

    return function
