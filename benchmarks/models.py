"""The models and their inputs: random weights from a seed, nothing is downloaded."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from benchmarks.plan import Case

__all__ = ["made_inputs", "made_model", "register_result_types"]

_SEED: Final = 2026


def made_model(case: Case, *, small: bool) -> nn.Module:
    """Return the model of a case, on the CPU, in its element type and eval mode.

    Args:
        case: The row.
        small: Far fewer and smaller layers, and float32, for a trial of this tool on a CPU.
    """
    torch.manual_seed(_SEED)
    net = {"mlp": _mlp, "resnet50": _resnet, "bert": _bert, "vit": _vit}[case.model](small)
    return net.to(_dtype(case, small=small)).eval()


def made_inputs(case: Case, *, small: bool, seed: int = 0) -> tuple[Tensor, ...]:
    """Return the arguments of one call, on the CPU.

    The rows of BERT are of different lengths, so that its mask hides something.

    Args:
        case: The row.
        small: As for `made_model`.
        seed: Other seeds give other values of the same shapes.
    """
    generator = torch.Generator().manual_seed(seed)
    if case.model == "bert":
        length = 16 if small else 128
        ids = torch.randint(30_000, (case.batch, length), generator=generator)
        lengths = torch.randint(length // 2, length + 1, (case.batch, 1), generator=generator)
        return ids, (torch.arange(length) < lengths).to(torch.int64)
    side = 32 if small else 224
    shape = (256,) if case.model == "mlp" else (3, side, side)
    values = torch.randn(case.batch, *shape, generator=generator)
    return (values.to(_dtype(case, small=small)),)


def _dtype(case: Case, *, small: bool) -> torch.dtype:
    # CPUs are slow in half precision.
    return torch.float32 if small else getattr(torch, case.dtype)


def register_result_types(case: Case) -> None:
    """Import what makes PyTorch know the type of the model's result."""
    if case.model == "bert":
        import transformers.modeling_outputs  # noqa: F401, PLC0415


def _mlp(small: bool) -> nn.Module:  # noqa: ARG001, FBT001
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _resnet(small: bool) -> nn.Module:  # noqa: FBT001
    # The usual start has zeros in the last scale of each block, and zeros are quicker to multiply.
    return _timm("resnet18" if small else "resnet50", zero_init_last=False)


def _vit(small: bool) -> nn.Module:  # noqa: FBT001
    sizes = {"img_size": 32, "depth": 2, "embed_dim": 96} if small else {}
    return _timm("vit_base_patch16_224", **sizes)


def _timm(name: str, **settings: Any) -> nn.Module:  # noqa: ANN401
    import timm  # noqa: PLC0415

    return cast("nn.Module", timm.create_model(name, pretrained=False, **settings))


def _bert(small: bool) -> nn.Module:  # noqa: FBT001
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2} if small else {}
    return cast("nn.Module", BertModel(BertConfig(**sizes)))
