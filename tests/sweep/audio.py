"""Audio models of transformers, and models of two kinds of input."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn

from .family import Call, Family, from_config, image_call, text_call

_WAV2VEC: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 16,
}
_WHISPER: Final[dict[str, Any]] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 24,
}
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_IMAGE: Final[dict[str, Any]] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def _wave(batch: int, samples: int) -> Call:
    return {"input_values": torch.randn(batch, samples)}


def _masked_wave(batch: int, samples: int) -> Call:
    mask: Tensor = torch.ones(batch, samples, dtype=torch.int64)
    mask[1:, samples // 2 :] = 0
    return {**_wave(batch, samples), "attention_mask": mask}


def _mel(batch: int) -> Call:
    return {"input_features": torch.randn(batch, 16, 48)}


def _spectrogram(batch: int) -> Call:
    return {"input_values": torch.randn(batch, 64, 16)}


def _wave_family(name: str, model: str, config: str, *, mask: bool = False) -> Family:
    settings = {**_WAV2VEC, "feat_extract_norm": "layer"} if mask else _WAV2VEC
    return Family(
        name=name,
        group="Audio",
        build=from_config(model, config, **settings),
        call=_masked_wave if mask else _wave,
        dims=("batch", "samples"),
        recorded=((1, 400), (4, 1600), (2, 700)),
        unseen=((3, 1000), (2, 1599), (1, 444)),
    )


def _fixed_family(name: str, model: str, config: str, call: Any, **settings: Any) -> Family:
    return Family(
        name=name,
        group="Audio",
        build=from_config(model, config, **settings),
        call=call,
        dims=("batch",),
        recorded=((1,), (8,), (4,)),
        unseen=((2,), (5,), (7,)),
    )


class WhisperEncoder(nn.Module):
    """The encoder alone."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_features: Tensor) -> Any:
        return self.encoder(input_features)


def _whisper_encoder() -> nn.Module:
    config = transformers.WhisperConfig(**_WHISPER, decoder_layers=1, decoder_attention_heads=4)
    return WhisperEncoder(transformers.WhisperModel(config).encoder)


AUDIO: Final = (
    _wave_family("Wav2Vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config"),
    _wave_family("Wav2Vec2, masked", "Wav2Vec2Model", "Wav2Vec2Config", mask=True),
    _wave_family("HuBERT", "HubertModel", "HubertConfig"),
    _wave_family("WavLM", "WavLMModel", "WavLMConfig"),
    Family(
        name="Whisper encoder",
        group="Audio",
        build=_whisper_encoder,
        call=_mel,
        dims=("batch",),
        recorded=((1,), (8,), (4,)),
        unseen=((2,), (5,), (7,)),
    ),
    _fixed_family(
        "AST",
        "ASTForAudioClassification",
        "ASTConfig",
        _spectrogram,
        **{**_IMAGE, "patch_size": 8, "max_length": 64, "num_mel_bins": 16},
        frequency_stride=4,
        time_stride=4,
    ),
)


def _pair(model: str, config: str, **settings: Any) -> Any:
    return from_config(
        model,
        config,
        text_config={**_TEXT, **settings.pop("text", {})},
        vision_config=_IMAGE,
        projection_dim=16,
        **settings,
    )


def _pair_call(batch: int, length: int) -> Call:
    return {**text_call(batch, length), **image_call(batch)}


def _clip_call(batch: int, length: int) -> Call:
    call = _pair_call(batch, length)
    # CLIP reads the text at its end token.
    call["input_ids"][:, -1] = 2
    return call


def _siglip_call(batch: int, length: int) -> Call:
    call = _pair_call(batch, length)
    del call["attention_mask"]
    return call


def _pair_family(name: str, build: Any, call: Any) -> Family:
    return Family(
        name=name,
        group="Text with images",
        build=build,
        call=call,
        dims=("batch", "length"),
        recorded=((1, 5), (4, 24), (3, 9)),
        unseen=((2, 17), (4, 6), (1, 23)),
    )


MULTIMODAL: Final = (
    _pair_family("CLIP", _pair("CLIPModel", "CLIPConfig"), _clip_call),
    _pair_family("SigLIP", _pair("SiglipModel", "SiglipConfig"), _siglip_call),
    _pair_family(
        "BLIP",
        _pair("BlipForImageTextRetrieval", "BlipConfig", text={"encoder_hidden_size": 32}),
        _pair_call,
    ),
    _pair_family(
        "ViLT",
        from_config("ViltModel", "ViltConfig", **{**_TEXT, **_IMAGE}, max_image_length=-1),
        _pair_call,
    ),
)
