"""Vision models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn

from .family import Call, Family, from_config, image_call, image_family, sized_image_family

_GROUP: Final = "Vision"
_VIT: Final[dict[str, Any]] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_STAGES: Final[dict[str, Any]] = {
    "embedding_size": 16,
    "hidden_sizes": [16, 24, 32, 40],
    "depths": [1, 1, 1, 1],
}
_SEGFORMER: Final[dict[str, Any]] = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 16, 24, 32],
    "num_attention_heads": [1, 2, 2, 4],
    "decoder_hidden_size": 32,
    "num_labels": 5,
}
_FIXED: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "ViT": ("ViTForImageClassification", "ViTConfig", _VIT),
    "DeiT": ("DeiTModel", "DeiTConfig", _VIT),
    "BEiT": ("BeitModel", "BeitConfig", {**_VIT, "use_relative_position_bias": True}),
    "Swin": (
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "YOLOS": (
        "YolosForObjectDetection",
        "YolosConfig",
        {**_VIT, "image_size": [32, 32], "num_detection_tokens": 5},
    ),
    "MobileViT": (
        "MobileViTModel",
        "MobileViTConfig",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32],
            "num_attention_heads": 4,
        },
    ),
}
_SIZED: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", {**_STAGES, "num_labels": 5}),
    "RegNet": ("RegNetModel", "RegNetConfig", {**_STAGES, "groups_width": 8}),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1], "num_labels": 5},
    ),
    "ConvNeXt V2": (
        "ConvNextV2Model",
        "ConvNextV2Config",
        {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1]},
    ),
    "MobileNetV2": ("MobileNetV2Model", "MobileNetV2Config", {"depth_multiplier": 0.25}),
    "EfficientNet": (
        "EfficientNetModel",
        "EfficientNetConfig",
        {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    ),
    "PoolFormer": (
        "PoolFormerModel",
        "PoolFormerConfig",
        {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1]},
    ),
    "SegFormer": ("SegformerForSemanticSegmentation", "SegformerConfig", _SEGFORMER),
    "DINOv2": ("Dinov2Model", "Dinov2Config", _VIT),
}


def _swin_of_any_size() -> nn.Module:
    return from_config("SwinModel", "SwinConfig", **_FIXED["Swin"][2])()


def _detr() -> nn.Module:
    backbone = transformers.ResNetConfig(**_STAGES, out_features=["stage4"])
    config = transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_queries=6,
        num_labels=5,
    )
    module: nn.Module = transformers.DetrForObjectDetection(config)
    return module


def _masked_image_call(batch: int, height: int, width: int) -> Call:
    mask: Tensor = torch.ones(batch, height, width, dtype=torch.int64)
    mask[1:, :, width - 16 :] = 0
    return {**image_call(batch, height, width), "pixel_mask": mask}


def _interpolating_call(batch: int, height: int, width: int) -> Call:
    return {**image_call(batch, height, width), "interpolate_pos_encoding": True}


def _sized(name: str, build: Callable[[], nn.Module], call: Callable[..., Call]) -> Family:
    return Family(
        name=name,
        group=_GROUP,
        build=build,
        call=call,
        dims=("batch", "height", "width"),
        recorded=((1, 32, 64), (4, 96, 128), (2, 64, 96)),
        unseen=((3, 64, 64), (2, 96, 96), (1, 80, 72)),
    )


VISION: Final = (
    *(
        image_family(_GROUP, name, from_config(model, config, **settings))
        for name, (model, config, settings) in _FIXED.items()
        if name != "MobileViT"
    ),
    Family(
        name="MobileViT",
        group=_GROUP,
        build=from_config(*_FIXED["MobileViT"][:2], **_FIXED["MobileViT"][2]),
        call=lambda batch: image_call(batch, 64, 64),
        dims=("batch",),
        recorded=((1,), (8,), (4,)),
        unseen=((2,), (5,), (7,)),
    ),
    *(
        sized_image_family(_GROUP, name, from_config(model, config, **settings))
        for name, (model, config, settings) in _SIZED.items()
    ),
    _sized("ViT, any size", from_config(*_FIXED["ViT"][:2], **_VIT), _interpolating_call),
    _sized("Swin, any size", _swin_of_any_size, image_call),
    _sized("DETR", _detr, _masked_image_call),
)
