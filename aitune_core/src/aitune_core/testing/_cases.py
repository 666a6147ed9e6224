"""The modules that a backend is asked to build, with the calls that were recorded of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import torch
from torch import Tensor, nn

__all__ = ["CASES", "Case", "dtypes_case"]

Arguments: TypeAlias = tuple[Any, ...]


@attrs.frozen(kw_only=True)
class Case:
    """A module with calls of it.

    Attributes:
        name: Name in test ids.
        make: Makes the module.
        calls: Makes the positional arguments of each call.
    """

    name: str
    make: Callable[[], nn.Module]
    calls: Callable[[], Sequence[Arguments]]


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class _Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.head(self.conv(image).relu().mean((2, 3)))
        return result


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.table(ids).cumsum(1)
        return result


class _Several(nn.Module):
    """Its inputs, and its outputs, are of one shape, so that only their order tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, first: Tensor, rest: Mapping[str, Tensor]) -> dict[str, Any]:
        hidden = self.linear(first) - 2 * rest["b"]
        return {"last": hidden, "parts": (hidden + rest["a"], 3 * rest["b"])}


class _Aliased(nn.Module):
    """Returns one tensor twice, a view of it, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.linear(x)
        return hidden, hidden, hidden.transpose(0, 1), x


class _Scalars(nn.Module):
    """Takes and returns tensors without axes."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x * scale, scale + 1


class _Empty(nn.Module):
    """Takes and returns tensors without elements."""

    def forward(self, x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((2 * x, extra), 1), extra + 1


class _InPlace(nn.Module):
    """Changes its input, whose final value is a further output of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class _Dtypes(nn.Module):
    """Returns something of each of its inputs, which have a dtype each."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(~x if x.dtype is torch.bool else x + x for x in inputs)


def _of_dtype(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(3, 4).to(dtype)
    return torch.randint(0, 2, (3, 4)).to(dtype)


def dtypes_case(dtypes: Sequence[torch.dtype]) -> Case:
    """Return the case with one input per dtype."""
    return Case(
        name="dtypes", make=_Dtypes, calls=lambda: [tuple(_of_dtype(dtype) for dtype in dtypes)]
    )


def _rows() -> dict[str, Tensor]:
    return {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}


CASES: Final = (
    Case(name="mlp", make=_Mlp, calls=lambda: [(torch.randn(2, 4),), (torch.randn(6, 4),)]),
    Case(
        name="conv",
        make=_Conv,
        calls=lambda: [(torch.randn(1, 3, 8, 8),), (torch.randn(3, 3, 8, 8),)],
    ),
    Case(
        name="embedding",
        make=_Embedding,
        calls=lambda: [(torch.randint(11, (2, 5)),), (torch.randint(11, (3, 8)),)],
    ),
    Case(name="several", make=_Several, calls=lambda: [(torch.randn(2, 4), _rows())]),
    Case(name="aliased", make=_Aliased, calls=lambda: [(torch.randn(3, 4),)]),
    Case(name="scalars", make=_Scalars, calls=lambda: [(torch.randn(2, 3), torch.tensor(1.5))]),
    Case(
        name="empty",
        make=_Empty,
        calls=lambda: [
            (torch.randn(0, 4), torch.randn(0, 0)),
            (torch.randn(3, 4), torch.randn(3, 0)),
        ],
    ),
    Case(name="in_place", make=_InPlace, calls=lambda: [(torch.randn(2, 3),)]),
)
