"""Containers in calls and results: tensors inside are inputs and outputs, the rest stays."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Pair(NamedTuple):
    """Two tensors with names."""

    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Tokens:
    """Tensors and a word about them."""

    ids: Tensor
    weights: Tensor
    kind: str = "text"


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Cannot be assigned to."""

    value: Tensor
    scale: float = 0.5


@dataclasses.dataclass
class Prediction:
    """A result with fields that may be missing."""

    scores: Tensor
    hidden: tuple[Tensor, ...] | None = None
    loss: Tensor | None = None
    kind: str = "softmax"
    extra: list[Any] = dataclasses.field(default_factory=list)


class Sum(nn.Module):
    """A different multiple of each tensor of a tree."""

    def forward(self, tree: Any, y: Tensor) -> Tensor:
        for position, leaf in enumerate(_leaves(tree)):
            y = y + (position + 1) * leaf
        return y


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if tree is None or isinstance(tree, str | int | float):
        return []
    if dataclasses.is_dataclass(tree):
        values = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        values = list(tree.values()) if isinstance(tree, dict) else list(tree)
    return [leaf for value in values for leaf in _leaves(value)]


def _t(rows: int) -> Tensor:
    return torch.randn(rows, 4)


def _marked(kinds: Iterable[str], rare: frozenset[str]) -> list[Any]:
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind in rare)) for kind in kinds]


#: Left to the long run: neighbours of kinds that the short one has.
RARE_TREES = frozenset({"defaultdict", "frozen dataclass", "int keys", "list", "tuple"})
TREES: dict[str, Callable[[int], Any]] = {
    "list": lambda n: [_t(n), _t(n), _t(n)],
    "tuple": lambda n: (_t(n), _t(n)),
    "namedtuple": lambda n: Pair(_t(n), _t(n)),
    "dataclass": lambda n: Tokens(_t(n), _t(n)),
    "frozen dataclass": lambda n: Frozen(_t(n)),
    "OrderedDict": lambda n: OrderedDict(b=_t(n), a=_t(n)),
    "defaultdict": lambda n: defaultdict(list, {"b": _t(n), "a": _t(n)}),
    "int keys": lambda n: {1: _t(n), 0: _t(n), "1": _t(n)},
    "keys that read alike": lambda n: {
        "a": {"b": _t(n)},
        "a_b": _t(n),
        "a.b": _t(n),
        "['a']": _t(n),
    },
    "nested": lambda n: {"x": [_t(n), (None, {"y": _t(n), "z": []})], "w": Pair(_t(n), _t(n))},
}


@pytest.mark.parametrize("kind", _marked(TREES, RARE_TREES))
def test_tensors_of_a_container_are_inputs(tune: Tune, kind: str) -> None:
    make = TREES[kind]
    tuned = tune(Sum(), [(make(2), _t(2)), (make(5), _t(5))])
    assert len(tuned.graphs) == 1
    tuned.same(make(3), _t(3))


def test_each_length_of_a_list_has_a_graph_and_other_lengths_are_misses(tune: Tune) -> None:
    def call(rows: int, count: int) -> Any:
        return [_t(rows) for _ in range(count)], _t(rows)

    tuned = tune(Sum(), [call(2, 3), call(4, 3), call(2, 2), call(4, 2)])
    assert len(tuned.graphs) == 2
    tuned.same(*call(3, 2))
    tuned.same(*call(3, 3))
    error = tuned.misses(*call(2, 4))
    assert error.path == "tree"
    assert "list of 4" in str(error.got)


def test_list_and_tuple_are_different_calls(tune: Tune) -> None:
    tuned = tune(Sum(), [((_t(2), _t(2)), _t(2))])
    tuned.same((_t(2), _t(2)), _t(2))
    error = tuned.misses([_t(2), _t(2)], _t(2))
    assert error.path == "tree"


def test_order_of_keys_is_part_of_a_call(tune: Tune) -> None:
    def call(rows: int, *keys: str) -> Any:
        return {key: _t(rows) for key in keys}, _t(rows)

    tuned = tune(
        Sum(), [call(2, "a", "b"), call(3, "a", "b"), call(2, "b", "a"), call(3, "b", "a")]
    )
    assert len(tuned.graphs) == 2
    tuned.same(*call(2, "a", "b"))
    tuned.same(*call(2, "b", "a"))


def test_plain_values_beside_tensors_are_part_of_a_call(tune: Tune) -> None:
    tuned = tune(Sum(), [(Tokens(_t(2), _t(2)), _t(2)), (Tokens(_t(5), _t(5)), _t(5))])
    tuned.same(Tokens(_t(3), _t(3), kind="text"), _t(3))
    error = tuned.misses(Tokens(_t(3), _t(3), kind="speech"), _t(3))
    assert error.path is not None
    assert error.path.startswith("tree")
    assert "speech" in str(error)


def test_optional_tensors_deep_in_a_call_have_graphs_of_their_own(tune: Tune) -> None:
    class Deep(nn.Module):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            y: Tensor = batch["text"]["ids"] * 2
            mask = batch["text"]["mask"]
            image = batch["image"]
            y = y if mask is None else y * mask
            return y if image is None else y + image["pixels"][0]

    def call(rows: int, *, mask: bool, image: bool) -> Any:
        text = {"ids": _t(rows), "mask": _t(rows) if mask else None}
        return ({"text": text, "image": {"pixels": [_t(rows)]} if image else None},), {}

    forms = [{"mask": a, "image": b} for a, b in ((True, True), (False, False), (True, False))]
    tuned = tune(Deep(), [call(rows, **form) for form in forms for rows in (2, 4)])
    assert len(tuned.graphs) == 3
    for form in forms:
        tuned.same(*call(3, **form)[0])
    error = tuned.misses(*call(3, mask=False, image=True)[0])
    assert error.path is not None
    assert error.path.startswith("batch")


def test_sixty_four_tensors_in_nested_dicts_stay_apart(tune: Tune) -> None:
    class Many(nn.Module):
        def forward(self, cache: dict[str, Any], x: Tensor) -> dict[str, Any]:
            return {
                layer: {
                    name: (x - pair[0], pair[1] * (int(layer[5:]) + 1))
                    for name, pair in parts.items()
                }
                for layer, parts in cache.items()
            }

    def call(rows: int) -> Any:
        cache = {
            f"layer{layer}": {name: (_t(rows), _t(rows)) for name in ("key", "value")}
            for layer in range(16)
        }
        return cache, _t(rows)

    tuned = tune(Many(), [call(2), call(3)])
    tuned.same(*call(2))
    tuned.same(*call(3))


class Returns(nn.Module):
    """Builds its result with a function."""

    def __init__(self, build: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 3)
        self.build = build

    def forward(self, x: Tensor) -> Any:
        return self.build(self.mix(x))


#: Left to the long run: neighbours of kinds that the short one has.
RARE_RESULTS = frozenset({"OrderedDict", "frozen dataclass", "list", "tuple of one"})
RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda y: [y, y.sum(-1)],
    "list of one": lambda y: [y],
    "tuple of one": lambda y: (y,),
    "namedtuple": lambda y: Pair(y.exp(), y),
    "dataclass": lambda y: Prediction(y.softmax(-1), hidden=(y, y * 2)),
    "frozen dataclass": lambda y: Frozen(y, 0.25),
    "OrderedDict": lambda y: OrderedDict(z=y, a=-y),
    "nested": lambda y: {
        "z": (y + 1, None, [y.sum(-1)]),
        "n": 3,
        "word": "ok",
        "empty": [],
        "none": {},
        "a": {"m": y.amax(0), 7: Pair(y, y.int())},
        "number": -0.0,
        "dtype": torch.float16,
        "flag": True,
    },
    "names of operators": lambda y: {
        "softmax": y.softmax(-1),
        "output_0": y.mean(0),
        "input_0": y + 1,
        "x": y - 1,
        "": y * 2,
        "a b/c:0": y * 3,
    },
}


@pytest.mark.parametrize("kind", _marked(RESULTS, RARE_RESULTS))
def test_result_has_the_containers_and_plain_values_of_eager(tune: Tune, kind: str) -> None:
    tuned = tune(Returns(RESULTS[kind]), [_t(2), _t(5)])
    tuned.same(_t(3))


def test_two_results_do_not_share_containers(tune: Tune) -> None:
    tuned = tune(Returns(lambda y: {"list": [], "y": y}), [_t(2), _t(3)])
    first = tuned.same(_t(2))
    first["list"].append(1)
    first["more"] = 2
    second = tuned.same(_t(2))
    assert second["list"] == []
    assert "more" not in second


def test_result_whose_plain_values_change_is_refused(tune: Tune) -> None:
    with pytest.raises(ait.RecordingError) as caught:
        tune(Returns(lambda y: (y, y.shape[0])), [_t(2), _t(5)])
    assert caught.value.path == "out[1]"
    assert "is 2, then 5" in str(caught.value)


def test_result_of_an_unknown_kind_is_refused_by_name(tune: Tune) -> None:
    class Opaque:
        pass

    with pytest.raises(ait.RecordingError) as caught:
        tune(Returns(lambda y: {"y": y, "why": Opaque()}), [_t(2), _t(5)])
    assert caught.value.path == "out['why']"
    assert "Opaque" in str(caught.value)


def test_result_without_tensors_runs(tune: Tune) -> None:
    tuned = tune(Returns(lambda _: {"n": 3}), [_t(2)], wins=False, on_failure="eager")
    assert tuned.model(_t(2)) == {"n": 3}


class TextModel(nn.Module):
    """Takes what a tokenizer returns, and returns what transformers' models return."""

    def __init__(self, build: Callable[..., Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)
        self.build = build

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return self.build(last_hidden_state=hidden, hidden_states=(hidden, hidden * 2))


def _encoding(transformers: Any, rows: int, length: int) -> Any:
    return transformers.BatchEncoding(
        {
            "input_ids": torch.randint(0, 20, (rows, length)),
            "attention_mask": torch.ones(rows, length, dtype=torch.int64).tril(),
        }
    )


def test_model_output_stays_a_model_output(tune: Tune) -> None:
    pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    ids = torch.randint(0, 20, (3, 6))
    tuned = tune(TextModel(outputs.BaseModelOutput), [ids[:2, :4], ids])
    got = tuned.same(ids[:, :5])
    assert type(got) is outputs.BaseModelOutput
    assert got.attentions is None
    assert got[0] is got.last_hidden_state
    assert list(got) == ["last_hidden_state", "hidden_states"]
    assert len(got.to_tuple()) == 2


def test_model_output_is_an_argument(tune: Tune) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Head(nn.Module):
        def forward(self, encoded: Any) -> Tensor:
            hidden: Tensor = encoded.last_hidden_state
            other: Tensor = encoded[1][0]
            return hidden.sum(1) + other.mean(1)

    def call(rows: int) -> Any:
        hidden = torch.randn(rows, 3, 4)
        return outputs.BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden * 2,))

    tuned = tune(Head(), [((call(2),), {}), ((call(5),), {})])
    tuned.same(call(3))


def test_batch_encoding_is_keywords_in_tune_and_in_calls(tune: Tune) -> None:
    transformers = pytest.importorskip("transformers")
    module = TextModel(lambda **fields: fields["last_hidden_state"])
    calls = [_encoding(transformers, 2, 4), _encoding(transformers, 3, 6)]
    tuned = tune(module, calls)
    tuned.same(**_encoding(transformers, 3, 5))


def test_batch_encoding_as_one_argument_is_refused_with_the_way_out(tune: Tune) -> None:
    transformers = pytest.importorskip("transformers")

    class Whole(nn.Module):
        def forward(self, inputs: Any) -> Tensor:
            ids: Tensor = inputs["input_ids"]
            return ids * 2

    with pytest.raises(ait.RecordingError) as caught:
        tune(Whole(), [((_encoding(transformers, 2, 4),), {})])
    assert caught.value.path == "inputs"
    assert "BatchEncoding" in str(caught.value)
    assert "**" in str(caught.value)
