"""Text decoders of transformers: whole sequences, and one step with the cache as tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .family import Call, Family, from_config, padding_mask, text_call, text_family, token_ids

_CACHED: Final = "Text decoders with their cache as tensors"
_LAYERS, _HEADS, _KV_HEADS, _HEAD_SIZE = 2, 4, 2, 8
_GPT2: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": _LAYERS,
    "n_head": _HEADS,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PLAIN: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA: Final[dict[str, Any]] = {
    **_PLAIN,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_SIZE,
}
_GEMMA: Final[dict[str, Any]] = {
    **_LLAMA,
    "query_pre_attn_scalar": _HEAD_SIZE,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MIXTRAL: Final[dict[str, Any]] = {
    **_LLAMA,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_MAMBA: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
}
#: Name -> model, configuration, its settings, heads of keys and values.
_MODELS: Final[dict[str, tuple[str, str, dict[str, Any], int]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", _GPT2, _HEADS),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _PLAIN, _HEADS),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32},
        _HEADS,
    ),
    "Phi": ("PhiForCausalLM", "PhiConfig", _PLAIN, _HEADS),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", {**_LLAMA, "sliding_window": 8}, _KV_HEADS),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {**_PLAIN, "new_decoder_architecture": False, "multi_query": True, "alibi": False},
        1,
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, _KV_HEADS),
    "Mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**_LLAMA, "sliding_window": 8},
        _KV_HEADS,
    ),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, _KV_HEADS),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA, _KV_HEADS),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", _LLAMA, _KV_HEADS),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", _GEMMA, _KV_HEADS),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA, _KV_HEADS),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}, _HEADS),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", {**_PLAIN, "n_layer": 2, "n_head": 4}, _HEADS),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        _MIXTRAL,
        _KV_HEADS,
    ),
    "Mixtral, batched experts": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_MIXTRAL, "experts_implementation": "batched_mm"},
        _KV_HEADS,
    ),
}

DECODERS: Final = (
    *(
        text_family("Text decoders", name, from_config(model, config, use_cache=False, **settings))
        for name, (model, config, settings, _) in _MODELS.items()
    ),
    # Its scan is a loop over the sequence, which an export unrolls: short ones are quicker.
    Family(
        name="Mamba",
        group="Text decoders",
        build=from_config("MambaForCausalLM", "MambaConfig", use_cache=False, **_MAMBA),
        call=text_call,
        dims=("batch", "length"),
        recorded=((1, 3), (4, 8), (3, 5)),
        unseen=((2, 7), (4, 4), (1, 6)),
    ),
)


class StepWithCache(nn.Module):
    """A decoder whose cache goes in and comes out as keys and values of each layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        past: Sequence[tuple[Tensor, Tensor]],
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache = DynamicCache()
        for index, (keys, values) in enumerate(past):
            cache.update(keys, values, index)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache,
            use_cache=True,
        )
        return output.logits, [(layer.keys, layer.values) for layer in cache.layers]


def _step(heads: int, batch: int, new: int, past: int) -> Call:
    shape = (batch, heads, past, _HEAD_SIZE)
    return {
        "input_ids": token_ids(batch, new),
        "attention_mask": padding_mask(batch, past + new, left=True),
        "past": [(torch.randn(shape), torch.randn(shape)) for _ in range(_LAYERS)],
    }


def _one_token(heads: int, batch: int, past: int) -> Call:
    return _step(heads, batch, 1, past)


def _one_token_unmasked(heads: int, batch: int, past: int) -> Call:
    call = _step(heads, batch, 1, past)
    del call["attention_mask"]
    return call


def _step_family(name: str, *, masked: bool) -> Family:
    model, config, settings, heads = _MODELS[name]
    return Family(
        name=f"{name}, step" if masked else f"{name}, step without mask",
        group=_CACHED,
        build=from_config(model, config, StepWithCache, **settings),
        call=functools.partial(_one_token if masked else _one_token_unmasked, heads),
        dims=("batch", "past"),
        recorded=((1, 3), (4, 20), (2, 9)),
        unseen=((3, 14), (4, 5), (1, 19)),
    )


def _chunk_family(name: str) -> Family:
    model, config, settings, heads = _MODELS[name]
    return Family(
        name=f"{name}, chunk",
        group=_CACHED,
        build=from_config(model, config, StepWithCache, **settings),
        call=functools.partial(_step, heads),
        dims=("batch", "new", "past"),
        recorded=((1, 2, 3), (4, 9, 20), (2, 5, 9)),
        unseen=((3, 4, 14), (4, 8, 5), (1, 3, 19)),
    )


_WITH_CACHE: Final = (
    "GPT-2",
    "GPT-NeoX",
    "OPT",
    "Phi",
    "Falcon",
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma 3",
)
CACHED_DECODERS: Final = (
    *(_step_family(name, masked=True) for name in _WITH_CACHE),
    *(_step_family(name, masked=False) for name in ("GPT-2", "Llama")),
    *(_chunk_family(name) for name in ("GPT-2", "Llama")),
)
