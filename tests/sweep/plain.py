"""Families of plain PyTorch: convolutional, recurrent, and the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from . import nets
from .family import Call, Family, Sizes, padding_mask, token_ids

_SIZED: Final[tuple[tuple[Sizes, ...], tuple[Sizes, ...]]] = (
    ((1, 32, 64), (4, 96, 128), (2, 64, 96)),
    ((3, 64, 64), (2, 96, 96), (1, 80, 72)),
)
_BATCH: Final[tuple[tuple[Sizes, ...], tuple[Sizes, ...]]] = (
    ((1,), (8,), (4,)),
    ((2,), (5,), (7,)),
)
_LENGTH: Final[tuple[tuple[Sizes, ...], tuple[Sizes, ...]]] = (
    ((1, 5), (4, 24), (3, 9)),
    ((2, 17), (4, 6), (1, 23)),
)
_TWO_LENGTHS: Final[tuple[tuple[Sizes, ...], tuple[Sizes, ...]]] = (
    ((1, 5, 3), (4, 24, 18), (3, 9, 7)),
    ((2, 17, 12), (4, 6, 17), (1, 23, 4)),
)


def _image(batch: int, height: int = 32, width: int = 32, *, name: str = "input") -> Call:
    return {name: torch.randn(batch, 3, height, width)}


def _rows(batch: int) -> Call:
    return {"input": torch.randn(batch, 12)}


def _series(batch: int, length: int) -> Call:
    return {"x": torch.randn(batch, 8, length)}


def _ids(batch: int, length: int) -> Call:
    return {"input_ids": token_ids(batch, length)}


def _with_state(batch: int, length: int) -> Call:
    state = (torch.randn(2, batch, 24), torch.randn(2, batch, 24))
    return {**_ids(batch, length), "state": state}


def _padded(batch: int, length: int) -> Call:
    return {**_ids(batch, length), "padding": padding_mask(batch, length) == 0}


def _with_memory(batch: int, source: int, target: int) -> Call:
    return {
        "target_ids": token_ids(batch, target),
        "memory": torch.randn(batch, source, 32),
    }


def _two_sequences(batch: int, source: int, target: int) -> Call:
    return {
        "source": torch.randn(source, batch, 32),
        "target": torch.randn(target, batch, 32),
    }


def _features(batch: int, length: int) -> Call:
    sparse = [torch.randint(50, (batch, length)), torch.randint(50, (batch, length + 2))]
    return {"dense": torch.randn(batch, 6), "sparse": sparse}


def _bags(bags: int, ids: int) -> Call:
    cuts = torch.randint(1, ids, (bags,)).sort().values
    cuts[0] = 0
    return {"ids": torch.randint(50, (ids,)), "offsets": cuts}


def _families(
    group: str,
    dims: tuple[str, ...],
    sizes: tuple[tuple[Sizes, ...], tuple[Sizes, ...]],
    members: dict[str, tuple[Callable[[], nn.Module], Callable[..., Call]]],
) -> tuple[Family, ...]:
    recorded, unseen = sizes
    return tuple(
        Family(
            name=name,
            group=group,
            build=build,
            call=call,
            dims=dims,
            recorded=recorded,
            unseen=unseen,
        )
        for name, (build, call) in members.items()
    )


CONVOLUTIONAL: Final = _families(
    "Convolutional",
    ("batch", "height", "width"),
    _SIZED,
    {
        "residual network": (nets.residual_net, _image),
        "inverted bottlenecks": (nets.mobile_net, _image),
        "depthwise mixer": (nets.depthwise_mixer, _image),
        "U-Net, group norm": (nets.UNet, functools.partial(_image, name="x")),
        "autoencoder": (nets.autoencoder, _image),
    },
) + _families(
    "Convolutional",
    ("batch", "length"),
    _LENGTH,
    {"temporal convolutions": (nets.TemporalConvolutions, _series)},
)
RECURRENT: Final = _families(
    "Recurrent",
    ("batch", "length"),
    _LENGTH,
    {
        "LSTM": (functools.partial(nets.Tagger, nn.LSTM), _ids),
        "LSTM, state given": (functools.partial(nets.Tagger, nn.LSTM), _with_state),
        "LSTM, both directions": (
            functools.partial(nets.Tagger, nn.LSTM, bidirectional=True),
            _ids,
        ),
        "GRU": (functools.partial(nets.Tagger, nn.GRU), _ids),
        "GRU, both directions": (functools.partial(nets.Tagger, nn.GRU, bidirectional=True), _ids),
        "RNN": (functools.partial(nets.Tagger, nn.RNN), _ids),
        "RNN, both directions": (functools.partial(nets.Tagger, nn.RNN, bidirectional=True), _ids),
    },
)
OTHER: Final = (
    *_families(
        "Other PyTorch modules",
        ("batch",),
        _BATCH,
        {
            "multilayer perceptron": (nets.perceptron, _rows),
            "MLP-Mixer": (nets.Mixer, functools.partial(_image, name="x")),
        },
    ),
    *_families(
        "Other PyTorch modules",
        ("batch", "length"),
        _LENGTH,
        {
            "nn.TransformerEncoder, not nested": (nets.TorchEncoder, _padded),
            "recommender (DLRM)": (nets.Recommender, _features),
            "embedding bags at offsets": (nets.OffsetBags, _bags),
        },
    ),
    *_families(
        "Other PyTorch modules",
        ("batch", "source", "target"),
        _TWO_LENGTHS,
        {
            "nn.TransformerDecoder": (
                functools.partial(nets.TorchDecoder, told=False),
                _with_memory,
            ),
            "nn.TransformerDecoder, told causal": (
                functools.partial(nets.TorchDecoder, told=True),
                _with_memory,
            ),
            "nn.Transformer": (nets.TorchTransformer, _two_sequences),
        },
    ),
)
