"""What a family of models is, and the parts that their factories share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
import transformers
from torch import Tensor, nn

#: One call: keyword arguments of the module.
Call: TypeAlias = dict[str, Any]
#: Sizes of a call, one for each of a family's dims.
Sizes: TypeAlias = tuple[int, ...]


@attrs.frozen(kw_only=True)
class Family:
    """A model family: how to build a small member of it, and how to call it.

    Attributes:
        name: Its name in the table.
        group: The heading under which the table lists it.
        build: Makes the module; weights are set afterwards.
        call: Makes a call of given sizes, out of torch's generator.
        dims: What the sizes of a call stand for.
        recorded: Sizes of the calls that are recorded.
        unseen: Sizes of the calls that are checked, inside the recorded ranges.
    """

    name: str
    group: str
    build: Callable[[], nn.Module]
    call: Callable[..., Call]
    dims: tuple[str, ...]
    recorded: tuple[Sizes, ...]
    unseen: tuple[Sizes, ...]


def from_config(
    model: str, config: str, wrap: Callable[[nn.Module], nn.Module] | None = None, **settings: Any
) -> Callable[[], nn.Module]:
    """Return a factory of a transformers model.

    Args:
        model: Name of its class.
        config: Name of the class of its configuration.
        wrap: Puts a module around it.
        settings: Arguments of the configuration.
    """

    def build() -> nn.Module:
        module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return module if wrap is None else wrap(module)

    return build


def randomise(module: nn.Module) -> nn.Module:
    """Give every weight a value that matters, and return the module in eval mode.

    Fresh models have zero biases, unit scales and nearly uniform attention, which would hide an
    operator that uses them wrongly.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 / math.sqrt(parameter[0].numel()))
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.normal_(_statistic(part.running_mean), std=0.1)
                nn.init.uniform_(_statistic(part.running_var), 0.5, 1.5)
    return module.eval()


def _statistic(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer


def token_ids(batch: int, length: int, vocabulary: int = 64) -> Tensor:
    """Return token ids; the lowest ones, which stand for padding and the like, do not occur."""
    return torch.randint(4, vocabulary, (batch, length))


def padding_mask(batch: int, length: int, *, left: bool = False) -> Tensor:
    """Return 1 for a token and 0 for padding; the first row has none."""
    kept = torch.randint(1, length + 1, (batch, 1))
    kept[0] = length
    mask = (torch.arange(length) < kept).long()
    return mask.flip(1) if left else mask


def text_call(batch: int, length: int) -> Call:
    """Make a call of a text model: ids and a mask with padding on the right."""
    return {
        "input_ids": token_ids(batch, length),
        "attention_mask": padding_mask(batch, length),
    }


def image_call(batch: int, height: int = 32, width: int = 32) -> Call:
    """Make a call of a model that takes images with three channels."""
    return {"pixel_values": torch.randn(batch, 3, height, width)}


def text_family(group: str, name: str, build: Callable[[], nn.Module]) -> Family:
    """Return a family that takes a batch of padded sequences."""
    return Family(
        name=name,
        group=group,
        build=build,
        call=text_call,
        dims=("batch", "length"),
        recorded=((1, 5), (4, 24), (3, 9)),
        unseen=((2, 17), (4, 6), (1, 23)),
    )


def sized_image_family(group: str, name: str, build: Callable[[], nn.Module]) -> Family:
    """Return a family that takes images of any size."""
    return Family(
        name=name,
        group=group,
        build=build,
        call=image_call,
        dims=("batch", "height", "width"),
        recorded=((1, 32, 64), (4, 96, 128), (2, 64, 96)),
        unseen=((3, 64, 64), (2, 96, 96), (1, 80, 72)),
    )


def image_family(group: str, name: str, build: Callable[[], nn.Module]) -> Family:
    """Return a family that takes images of one size."""
    return Family(
        name=name,
        group=group,
        build=build,
        call=image_call,
        dims=("batch",),
        recorded=((1,), (8,), (4,)),
        unseen=((2,), (5,), (7,)),
    )
