"""Exported models of known forms, and what they are rewritten to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.external_data_helper import uses_external_data
from torch import Tensor, nn
from torch.nn import functional

from aitune_backend_onnxruntime.config import ONNXRuntimeBackendConfig
from aitune_backend_onnxruntime.export import export, export_plans
from aitune_backend_onnxruntime.rewriting import rewrite_file
from aitune_core.specs import DynamicDim

MakeCase = Callable[..., Any]

BATCH: Final = DynamicDim("batch", 1, 9, 2)
LENGTH: Final = DynamicDim("length", 2, 40, 10)
FREE: Final = {0: BATCH, 1: LENGTH}
WIDTH: Final = 32
HEADS: Final = 4
#: What the fused operators leave of two layers before their normalisation.
TWO_LAYERS: Final = {"Attention": 2, "SkipLayerNormalization": 4, "BiasGelu": 2, "Gelu": 0}


class PackedAttention(nn.Module):
    """As timm writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, HEADS, width // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        result = functional.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.proj(result.transpose(1, 2).reshape(batch, length, width))
        return joined


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = PackedAttention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 8, 8)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.position
        result: Tensor = self.norm(self.blocks(x))
        return result


class Causal(nn.Module):
    """As decoders write it, with the projections of queries, keys and values in one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        result = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.proj(result.transpose(1, 2).flatten(2))
        return joined


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q(x), self.k(y), self.v(y))
        )
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _layers(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, batch_first=batch_first, activation="gelu"
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class LastState(nn.Module):
    """A model of transformers with its two usual inputs."""

    def __init__(self, model: Any, *names: str) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        state: Tensor = self.model(**dict(zip(self.names, inputs, strict=True)))[0]
        return state


def _transformers(kind: str) -> LastState:
    transformers = pytest.importorskip("transformers")
    if kind == "GPT2":
        config = transformers.GPT2Config(
            n_embd=WIDTH,
            n_head=HEADS,
            n_layer=2,
            vocab_size=99,
            n_positions=64,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return LastState(transformers.GPT2Model(config), "input_ids")
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
    }
    if kind == "ViT":
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
        return LastState(transformers.ViTModel(config), "pixel_values")
    config = transformers.BertConfig(**sizes, vocab_size=99, max_position_embeddings=64)
    return LastState(transformers.BertModel(config), "input_ids", "attention_mask")


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 99, (batch, length))


def _padded(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length // 2 :] = 0
    return mask


@attrs.frozen(eq=False)
class Family:
    """A model, inputs it was recorded with, and others."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    others: Callable[[], tuple[Tensor, ...]]
    axes: tuple[dict[int, DynamicDim], ...]
    operators: dict[str, int]


FAMILIES: Final = {
    "vision": Family(
        Vision,
        lambda: (torch.randn(2, 3, 32, 32),),
        lambda: (torch.randn(7, 3, 32, 32),),
        ({0: BATCH},),
        {**TWO_LAYERS, "MatMul": 7, "Add": 2, "Conv": 0},
    ),
    "vision of one size": Family(
        Vision,
        lambda: (torch.randn(2, 3, 32, 32),),
        lambda: (torch.randn(2, 3, 32, 32),),
        ({},),
        {**TWO_LAYERS, "MatMul": 7, "Conv": 0},
    ),
    "layers": Family(
        lambda: _layers(batch_first=True),
        lambda: (torch.randn(2, 10, WIDTH),),
        lambda: (torch.randn(5, 33, WIDTH),),
        (FREE,),
        {**TWO_LAYERS, "MatMul": 6, "Reshape": 0, "Transpose": 0, "Add": 0, "Gemm": 0},
    ),
    "layers by length": Family(
        lambda: _layers(batch_first=False),
        lambda: (torch.randn(10, 2, WIDTH),),
        lambda: (torch.randn(33, 5, WIDTH),),
        ({0: LENGTH, 1: BATCH},),
        {**TWO_LAYERS, "MatMul": 6, "Reshape": 0, "Transpose": 4, "Add": 0, "Gemm": 0},
    ),
    "causal": Family(
        Causal,
        lambda: (torch.randn(2, 10, WIDTH),),
        lambda: (torch.randn(5, 33, WIDTH),),
        (FREE,),
        {"Attention": 1, "MatMul": 1, "Add": 1, "Reshape": 0, "Transpose": 0},
    ),
    "cross": Family(
        Cross,
        lambda: (torch.randn(2, 10, WIDTH), torch.randn(2, 7, WIDTH)),
        lambda: (torch.randn(5, 33, WIDTH), torch.randn(5, 7, WIDTH)),
        (FREE, {0: BATCH}),
        {"MultiHeadAttention": 1, "MatMul": 3, "Add": 0, "Reshape": 0, "Transpose": 0},
    ),
    "BERT": Family(
        lambda: _transformers("BERT"),
        lambda: (_ids(2, 10), torch.ones(2, 10, dtype=torch.int64)),
        lambda: (_ids(5, 33), _padded(5, 33)),
        (FREE, FREE),
        {**TWO_LAYERS, "MatMul": 6, "Transpose": 0},
    ),
    "ViT": Family(
        lambda: _transformers("ViT"),
        lambda: (torch.randn(2, 3, 32, 32),),
        lambda: (torch.randn(7, 3, 32, 32),),
        ({0: BATCH},),
        {**TWO_LAYERS, "MatMul": 7, "Where": 0, "Conv": 0},
    ),
    "GPT-2": Family(
        lambda: _transformers("GPT2"),
        lambda: (_ids(2, 10),),
        lambda: (_ids(5, 33),),
        (FREE,),
        {"Attention": 2, "SkipLayerNormalization": 4, "MatMul": 6, "Gemm": 0, "Transpose": 0},
    ),
}


def _exported(make: MakeCase, family: Family, *, half: bool = False) -> tuple[Any, Path]:
    torch.manual_seed(0)
    inputs = family.inputs()
    module = family.module()
    if half:
        module, inputs = module.half(), tuple(one.half() for one in inputs)
    case = make(module, *inputs, axes=family.axes, out_axes=family.axes[:1])
    plan = export_plans(ONNXRuntimeBackendConfig(opset_version=23), case.request.graph)[0]
    return case, export(plan, case.request, inputs).path


def _session(path: Path) -> onnxruntime.InferenceSession:
    """Open a model as on CUDA, but for the provider, and write what it becomes beside it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path.with_name("optimised.onnx"))
    options.add_session_config_entry("session.graph_optimizations_loop_level", "0")
    entry = "optimization.disable_specified_optimizers"
    options.add_session_config_entry(entry, "MatMulAddFusion;GemmTransposeFusion")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _counts(path: Path) -> Counter[str]:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes)


def _weights(path: Path) -> set[tuple[str, ...]]:
    """Return names and places of weights that are not in the model file itself."""
    return {
        (tensor.name, *(f"{entry.key} {entry.value}" for entry in tensor.external_data))
        for tensor in onnx.load(path, load_external_data=False).graph.initializer
        if uses_external_data(tensor)
    }


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_family_gets_fused_operators_with_the_same_results(case: MakeCase, family: Family) -> None:
    made, source = _exported(case, family)
    target = source.with_name("fast.onnx")
    assert rewrite_file(source, target)
    session = _session(target)
    found = _counts(source.with_name("optimised.onnx"))
    assert {name: found[name] for name in family.operators} == family.operators
    names = [value.name for value in onnx.load(source, load_external_data=False).graph.input]
    for inputs in (made.request.samples[0], family.others()):
        feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        for other, expected in zip(session.run(None, feeds), made.eager(*inputs), strict=True):
            one = expected.numpy()
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * np.abs(one).max())


def test_half_precision_is_rewritten_as_float32_is(case: MakeCase) -> None:
    for name in ("layers", "vision of one size"):
        _, source = _exported(case, FAMILIES[name], half=True)
        target = source.with_name("fast.onnx")
        assert rewrite_file(source, target)
        found = _counts(target)
        assert {operator: found[operator] for operator in TWO_LAYERS} == TWO_LAYERS


def test_weights_stay_in_their_file_and_the_source_as_it_is(case: MakeCase) -> None:
    _, source = _exported(case, FAMILIES["layers"])
    before = {path.name: path.read_bytes() for path in source.parent.iterdir()}
    targets = [source.with_name("one.onnx"), source.with_name("two.onnx")]
    for target in targets:
        rewrite_file(source, target)
    one, two = (target.read_bytes() for target in targets)
    assert one == two
    after = {path.name: path.read_bytes() for path in source.parent.iterdir()}
    assert after == {**before, "one.onnx": one, "two.onnx": two}
    kept = _weights(targets[0])
    assert kept
    assert kept <= _weights(source)


def test_inputs_and_outputs_stay_in_order_with_their_sizes(case: MakeCase) -> None:
    _, source = _exported(case, FAMILIES["cross"])
    target = source.with_name("fast.onnx")
    rewrite_file(source, target)
    old, new = (onnx.load(path, load_external_data=False).graph for path in (source, target))
    for mine, yours in ((old.input, new.input), (old.output, new.output)):
        assert [(one.name, one.type) for one in mine] == [(one.name, one.type) for one in yours]


def test_model_without_known_forms_is_not_written(case: MakeCase) -> None:
    family = Family(
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Sigmoid()),
        lambda: (torch.randn(2, 3, 10),),
        lambda: (torch.randn(2, 3, 10),),
        ({},),
        {},
    )
    _, source = _exported(case, family)
    target = source.with_name("fast.onnx")
    assert rewrite_file(source, target) == ()
    assert not target.exists()
