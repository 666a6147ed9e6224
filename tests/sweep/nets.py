"""Small networks of plain PyTorch, one for each kind of layer that people build with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """Adds a part's result to its input, which a second part may bring to the same shape."""

    def __init__(self, part: nn.Module, short: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part
        self.short = short or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.part(x) + self.short(x)
        return total


def conv_block(before: int, after: int, stride: int) -> nn.Module:
    """Return the two convolutions of a residual network, with batch normalisation."""
    main = nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, 1, 1, bias=False),
        nn.BatchNorm2d(after),
    )
    return nn.Sequential(Residual(main, nn.Conv2d(before, after, 1, stride)), nn.ReLU())


def residual_net() -> nn.Module:
    """Return a residual network that classifies images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        conv_block(16, 16, 1),
        conv_block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def inverted_block(width: int) -> nn.Module:
    """Return an inverted bottleneck with a depthwise convolution."""
    wide = 3 * width
    return Residual(
        nn.Sequential(
            nn.Conv2d(width, wide, 1),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            SqueezeExcite(wide),
            nn.Conv2d(wide, width, 1),
        )
    )


class SqueezeExcite(nn.Module):
    """Scales channels by what the whole image says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, 8, 1)
        self.up = nn.Conv2d(8, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.up(functional.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * functional.hardsigmoid(scale)


def mobile_net() -> nn.Module:
    """Return a network of inverted bottlenecks."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        inverted_block(16),
        nn.Conv2d(16, 24, 3, 2, 1),
        inverted_block(24),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def depthwise_mixer() -> nn.Module:
    """Return a network of depthwise and pointwise convolutions over patches."""
    mix = nn.Sequential(nn.Conv2d(24, 24, 5, padding=2, groups=24), nn.GELU(), nn.BatchNorm2d(24))
    return nn.Sequential(
        nn.Conv2d(3, 24, 4, 4),
        nn.GELU(),
        Residual(mix),
        nn.Conv2d(24, 24, 1),
        nn.GELU(),
        nn.BatchNorm2d(24),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


class UNet(nn.Module):
    """Two levels down and up again, with group normalisation and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self._level(3, 16)
        self.second = self._level(16, 24)
        self.bottom = self._level(24, 32)
        self.up = nn.ConvTranspose2d(32, 24, 2, 2)
        self.third = self._level(48, 24)
        self.last = self._level(40, 16)
        self.head = nn.Conv2d(16, 2, 1)

    @staticmethod
    def _level(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(4, after), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.avg_pool2d(second, 2))
        third = self.third(torch.cat((self.up(bottom), second), 1))
        above = functional.interpolate(third, scale_factor=2.0, mode="bilinear")
        result: Tensor = self.head(self.last(torch.cat((above, first), 1)))
        return result


def autoencoder() -> nn.Module:
    """Return a convolutional autoencoder."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 8, 3, 2, 1),
        nn.InstanceNorm2d(8, affine=True),
        nn.Tanh(),
        nn.ConvTranspose2d(8, 16, 4, 2, 1),
        nn.PReLU(16),
        nn.ConvTranspose2d(16, 3, 4, 2, 1),
        nn.Sigmoid(),
    )


class TemporalConvolutions(nn.Module):
    """Causal convolutions over time that reach further back in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3, dilation=dilation) for dilation in (1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Conv1d)
            past = 2 * layer.dilation[0]
            x = x + functional.elu(layer(functional.pad(x, (past, 0))))
        return x


def perceptron() -> nn.Module:
    """Return a multilayer perceptron."""
    return nn.Sequential(
        nn.Linear(12, 32),
        nn.BatchNorm1d(32),
        nn.GELU(),
        nn.Dropout(0.5),
        nn.Linear(32, 32),
        nn.LayerNorm(32),
        nn.SiLU(),
        nn.Linear(32, 3),
    )


class Mixer(nn.Module):
    """Mixes patches and channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.across = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.within = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        self.norm_across, self.norm_within = nn.LayerNorm(32), nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = tokens + self.across(self.norm_across(tokens).transpose(1, 2)).transpose(1, 2)
        tokens = tokens + self.within(self.norm_within(tokens))
        result: Tensor = self.head(tokens.mean(1))
        return result


class Recommender(nn.Module):
    """Bags of ids and dense numbers, and the products of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode=mode) for mode in ("mean", "sum"))
        self.dense = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(11, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        features = [self.dense(dense)]
        features += [bag(ids) for bag, ids in zip(self.bags, sparse, strict=True)]
        stacked = torch.stack(features, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, -1).unbind()
        result: Tensor = self.top(torch.cat((features[0], products[:, rows, columns]), 1))
        return result


class OffsetBags(nn.Module):
    """One long list of ids, cut into bags at offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, mode="sum")
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        result: Tensor = self.head(self.bag(ids, offsets))
        return result


class Tagger(nn.Module):
    """An embedding, a recurrent layer and a head; returns tags and the final state."""

    def __init__(self, layer: type[nn.RNNBase], *, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layer = layer(16, 24, 2, batch_first=True, bidirectional=bidirectional)  # type: ignore[arg-type]
        self.head = nn.Linear(48 if bidirectional else 24, 5)

    def forward(
        self, input_ids: Tensor, state: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        hidden, state = self.layer(self.embedding(input_ids), state)
        assert state is not None
        return self.head(hidden), state


class TorchEncoder(nn.Module):
    """PyTorch's own transformer encoder with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, padding: Tensor) -> Tensor:
        result: Tensor = self.encoder(self.embedding(input_ids), src_key_padding_mask=padding)
        return result


class TorchDecoder(nn.Module):
    """PyTorch's own transformer decoder with a causal mask.

    Args:
        told: Whether the decoder is told that the mask is causal; else it looks at its values.
    """

    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self.causal = True if told else None
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerDecoderLayer(32, 4, 48, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, target_ids: Tensor, memory: Tensor) -> Tensor:
        length = target_ids.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=memory.device).triu(1)
        result: Tensor = self.decoder(
            self.embedding(target_ids), memory, tgt_mask=hidden, tgt_is_causal=self.causal
        )
        return result


class TorchTransformer(nn.Module):
    """PyTorch's own encoder-decoder, with sequences along the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(32, 4, 2, 2, 48)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        result: Tensor = self.transformer(source, target)
        return result
