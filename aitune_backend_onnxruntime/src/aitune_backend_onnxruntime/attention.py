"""PyTorch's attention in a form that can be exported."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional
from torch.nn.modules import transformer

from aitune_backend_onnxruntime.hidden_rows import hiding
from aitune_backend_onnxruntime.patching import replaced_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["ATTENTION_OPSET", "plain_attention"]

#: From this opset on, ONNX has attention as an operator.
ATTENTION_OPSET: Final = 23

#: Batch, heads, length, width.
_RANK: Final = 4
#: A mask has at least queries and keys.
_MASK_RANK: Final = 2


@contextmanager
def plain_attention(*, operator: bool) -> Iterator[None]:
    """Make attention and ``nn.Transformer`` exportable, with the same results.

    - The fused eager path of ``nn.TransformerEncoderLayer`` has no ONNX form.
    - Whether a mask is causal is found out from its values, which an export has not. It only
      chooses a faster kernel.
    - Whether attention is causal may hang on a size in some decoders, where torch wants a bool.
      Which one it is becomes a condition on that size.
    - One head of keys and values that serves all queries is expanded, and so is one row of a mask:
      ONNX has no broadcast there.
    - Masks are written so that ONNX Runtime gives what eager gives for rows that they hide wholly.
    - Rows that are zeros in eager are made zeros where the exporter writes no operator for
      attention but its parts. Not so in ``nn.MultiheadAttention``, whose fused eager path gives no
      numbers there, and others zeros: the numeric check tells which form is right.

    Args:
        operator: Whether the exporter has an operator for it.
    """
    layers = _Layers()
    with (
        replaced_here(functional, "multi_head_attention_forward", layers.forward()),
        replaced_here(torch.backends.mha, "get_fastpath_enabled", _never),
        replaced_here(transformer, "_detect_is_causal_mask", _declared_causal),
        replaced_here(
            functional,
            "scaled_dot_product_attention",
            _attention(lambda rank: layers.running or (operator and rank == _RANK)),
        ),
    ):
        yield


class _Layers:
    """Knows whether a layer of attention runs."""

    def __init__(self) -> None:
        self.running = False

    def forward(self) -> Any:  # noqa: ANN401 - torch's function has no type of its own
        """Return torch's function for such a layer, which says that it runs."""
        real: Any = functional.multi_head_attention_forward

        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.running = True
            try:
                return real(*args, **kwargs)
            finally:
                self.running = False

        return forward


def _never() -> bool:
    """Say that the fused path is switched off."""
    return False


def _declared_causal(
    mask: Tensor | None,  # noqa: ARG001 - stands in for torch's function
    is_causal: bool | None = None,  # noqa: FBT001
    size: int | None = None,  # noqa: ARG001
) -> bool:
    """Whether the caller says that a mask is causal; otherwise it is used as it is."""
    return is_causal is True


def _attention(as_exported: Callable[[int], bool]) -> Any:  # noqa: ANN401 - torch's has no type
    """Return torch's attention in a form that exports where ``is_causal`` or heads hinder."""
    fused: Any = functional.scaled_dot_product_attention

    @functools.wraps(fused)
    def attention(  # noqa: PLR0913, PLR0917 - as torch's
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        **others: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        key, value = (_for_heads(query, part) for part in (key, value))
        if attn_mask is None:
            return fused(query, key, value, None, dropout_p, bool(is_causal), **others)
        query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
        rows = hiding(query, key, attn_mask, **others)
        mask = rows.mask(_for_queries(query, attn_mask), query.dtype)
        result = fused(query, key, value, mask, dropout_p, bool(is_causal), **others)
        if not mask.is_floating_point() or as_exported(query.dim()):
            return result
        return torch.where(rows.hidden(mask), 0.0, result)

    return attention


def _for_queries(query: Tensor, mask: Tensor) -> Tensor:
    # While a trace is made, sizes are tensors; it writes no operator that minds.
    if mask.dim() < _MASK_RANK or type(mask.shape[-2]) is not int or mask.shape[-2] != 1:
        return mask
    return mask.expand(*mask.shape[:-2], query.shape[-2], mask.shape[-1])


def _autocast(*parts: Tensor) -> Iterator[Tensor]:
    """Yield tensors in the dtype that attention computes in."""
    device = parts[0].device.type
    for part in parts:
        cast = part.dtype == torch.float32 and torch.is_autocast_enabled(device)
        yield part.to(torch.get_autocast_dtype(device)) if cast else part


def _for_heads(query: Tensor, part: Tensor) -> Tensor:
    if query.dim() != _RANK or part.dim() != _RANK:
        return part
    heads: int | torch.SymInt = query.shape[1]
    own: int | torch.SymInt = part.shape[1]
    if isinstance(heads, torch.SymInt) or isinstance(own, torch.SymInt) or own != 1:
        return part
    return part.expand(-1, heads, -1, -1)
