"""Encoder-decoder models of transformers, and one decoder step with their caches as tensors."""

from __future__ import annotations

from typing import Any, Final

import torch

from .family import Call, Family, from_config, padding_mask, token_ids

_BART: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
_T5: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "use_cache": False,
}
_WHISPER: Final[dict[str, Any]] = {**_BART, "num_mel_bins": 16, "max_source_positions": 24}
_MODELS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "T5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "BART": ("BartForConditionalGeneration", "BartConfig", {**_BART, "forced_eos_token_id": None}),
    "mBART": ("MBartForConditionalGeneration", "MBartConfig", _BART),
    "Marian": ("MarianMTModel", "MarianConfig", _BART),
    "M2M-100": ("M2M100ForConditionalGeneration", "M2M100Config", _BART),
}


def _call(batch: int, source: int, target: int) -> Call:
    return {
        "input_ids": token_ids(batch, source),
        "attention_mask": padding_mask(batch, source),
        "decoder_input_ids": token_ids(batch, target),
    }


def _whisper_call(batch: int, target: int) -> Call:
    # Whisper pads all sound to one length.
    return {
        "input_features": torch.randn(batch, 16, 48),
        "decoder_input_ids": token_ids(batch, target),
    }


def _family(name: str) -> Family:
    model, config, settings = _MODELS[name]
    return Family(
        name=name,
        group="Encoder-decoders",
        build=from_config(model, config, **settings),
        call=_call,
        dims=("batch", "source", "target"),
        recorded=((1, 5, 3), (4, 24, 18), (3, 9, 7)),
        unseen=((2, 17, 12), (4, 6, 17), (1, 23, 4)),
    )


SEQ2SEQ: Final = (
    *map(_family, _MODELS),
    Family(
        name="Whisper",
        group="Encoder-decoders",
        build=from_config("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER),
        call=_whisper_call,
        dims=("batch", "target"),
        recorded=((1, 3), (4, 18), (3, 7)),
        unseen=((2, 12), (4, 4), (1, 17)),
    ),
)
