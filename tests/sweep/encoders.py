"""Text encoders of transformers."""

from __future__ import annotations

from typing import Any, Final

from .family import Family, from_config, text_family

_BERT: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_DISENTANGLED: Final[dict[str, Any]] = {
    **_BERT,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
_MODELS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "BERT": ("BertModel", "BertConfig", _BERT),
    "RoBERTa": ("RobertaModel", "RobertaConfig", _BERT),
    "XLM-R": ("XLMRobertaModel", "XLMRobertaConfig", _BERT),
    "DistilBERT": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    "ALBERT": ("AlbertModel", "AlbertConfig", {**_BERT, "embedding_size": 16}),
    "ELECTRA": ("ElectraModel", "ElectraConfig", {**_BERT, "embedding_size": 16}),
    "DeBERTa": ("DebertaModel", "DebertaConfig", _DISENTANGLED),
    "DeBERTa-v2": (
        "DebertaV2Model",
        "DebertaV2Config",
        {**_DISENTANGLED, "position_buckets": 8, "share_att_key": True},
    ),
    "MPNet": ("MPNetModel", "MPNetConfig", _BERT),
    "ModernBERT": (
        "ModernBertModel",
        "ModernBertConfig",
        {**_BERT, "pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2},
    ),
    "RoFormer": ("RoFormerModel", "RoFormerConfig", _BERT),
    "ESM": (
        "EsmModel",
        "EsmConfig",
        {**_BERT, "pad_token_id": 1, "mask_token_id": 3, "position_embedding_type": "rotary"},
    ),
    "SqueezeBERT": ("SqueezeBertModel", "SqueezeBertConfig", {**_BERT, "embedding_size": 32}),
    "XLNet": (
        "XLNetModel",
        "XLNetConfig",
        {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    "NomicBERT": ("NomicBertModel", "NomicBertConfig", _BERT),
    "Longformer": ("LongformerModel", "LongformerConfig", {**_BERT, "attention_window": 8}),
}
ENCODERS: Final = tuple(
    text_family("Text encoders", name, from_config(model, config, **settings))
    for name, (model, config, settings) in _MODELS.items()
)

_HEADS: Final = {
    "BERT, masked tokens": "BertForMaskedLM",
    "BERT, all hidden states": "BertModel",
}


def _with_head(name: str, model: str) -> Family:
    hidden = "hidden states" in name
    settings = {**_BERT, "output_hidden_states": hidden}
    return text_family("Text encoders", name, from_config(model, "BertConfig", **settings))


ENCODER_HEADS: Final = tuple(_with_head(name, model) for name, model in _HEADS.items())
