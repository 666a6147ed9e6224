from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from treedata import same

from aitune_core import CallFormError
from aitune_core._calls import CallForm
from aitune_core._trees import Omitted

P = inspect.Parameter
NAMES = ["a", "b", "c", "d"]


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    count = draw(st.integers(0, 4))
    kinds = sorted(
        draw(
            st.lists(
                st.sampled_from([P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY]),
                min_size=count,
                max_size=count,
            )
        )
    )
    parameters: list[P] = []
    had_default = False
    for name, kind in zip(NAMES, kinds, strict=False):
        default: Any = P.empty
        must = had_default and kind is not P.KEYWORD_ONLY
        if must or draw(st.booleans()):
            default = draw(st.sampled_from([None, 0, 1.5, "s", (1, 2)]))
            had_default = had_default or kind is not P.KEYWORD_ONLY
        parameters.append(P(name, kind, default=default))
    if draw(st.booleans()):
        place = sum(parameter.kind is not P.KEYWORD_ONLY for parameter in parameters)
        parameters.insert(place, P("rest", P.VAR_POSITIONAL))
    if draw(st.booleans()):
        parameters.append(P("others", P.VAR_KEYWORD))
    return inspect.Signature(parameters)


arguments = st.one_of(
    st.integers(0, 2), st.none(), st.builds(lambda value: torch.tensor(value), st.integers(0, 9))
)
calls = st.tuples(
    st.lists(arguments, max_size=5).map(tuple),
    st.dictionaries(st.sampled_from([*NAMES, "rest", "others", "e"]), arguments, max_size=3),
)


def function_of(signature: inspect.Signature) -> Callable[..., dict[str, Any]]:
    """Return a function of this signature that returns its arguments as Python binds them."""
    scope: dict[str, Any] = {}
    exec(f"def forward{signature}: return dict(locals())", scope)  # noqa: S102 - the best oracle
    function: Callable[..., dict[str, Any]] = scope["forward"]
    return function


@settings(max_examples=300)
@given(signatures(), calls)
def test_bind_agrees_with_python(
    signature: inspect.Signature, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    function = function_of(signature)
    form = CallForm.of(function)
    args, kwargs = call
    try:
        expected = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(CallFormError):
            form.bind(args, kwargs)
        return
    found = form.bind(args, kwargs)
    names = [parameter.name for parameter in form.parameters]
    assert same(dict(zip(names, found, strict=True)), {name: expected[name] for name in names})


@settings(max_examples=300)
@given(signatures(), calls)
def test_arguments_give_an_equal_call(
    signature: inspect.Signature, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    function = function_of(signature)
    form = CallForm.of(function)
    try:
        expected = function(*call[0], **call[1])
    except TypeError:
        return
    leaves: list[Tensor] = []
    structure = form.structure(form.bind(*call), leaves)
    args, kwargs = form.arguments(structure, leaves)
    assert same(function(*args, **kwargs), expected)


@settings(max_examples=100)
@given(signatures())
def test_call_forms_round_trip_through_json(signature: inspect.Signature) -> None:
    form = CallForm.of(function_of(signature))
    restored = CallForm.from_json(json.loads(json.dumps(form.to_json())))
    assert restored.parameters == form.parameters
    assert str(restored) == str(form)


def form_of(function: Callable[..., Any]) -> CallForm:
    return CallForm.of(function)


def structure_of(form: CallForm, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return form.structure(form.bind(args, kwargs), [])


X, Y = torch.ones(1), torch.zeros(1)


def test_every_way_of_writing_a_call_has_one_structure() -> None:
    form = form_of(lambda x, scale=1.0, *, mask=None: None)
    written = [
        structure_of(form, X),
        structure_of(form, x=X),
        structure_of(form, X, 1.0),
        structure_of(form, mask=None, x=X),
        structure_of(form, X, scale=1.0, mask=None),
    ]
    assert len(set(written)) == 1
    assert structure_of(form, X, 2.0) != written[0]
    assert structure_of(form, X, mask=Y) != written[0]


def test_leaf_paths_start_with_the_parameter() -> None:
    form = form_of(lambda x, *rest, **others: None)
    structure = structure_of(form, [X, Y], X, other={"k": Y})
    assert form.leaf_paths(structure) == ["x[0]", "x[1]", "rest[0]", "others['other']['k']"]


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((), {}, "x"),
        ((1,), {"x": 1, "y": 2}, "x"),
        ((1,), {"y": 2, "z": 3}, "z"),
        ((1,), {}, "y"),
        ((1, 2), {"y": 3}, None),
    ],
)
def test_calls_that_do_not_fit_name_the_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: str | None
) -> None:
    form = form_of(lambda x, *, y: None)
    with pytest.raises(CallFormError) as caught:
        form.bind(args, kwargs)
    assert caught.value.path == path
    assert caught.value.expected == "(x, y)"


def test_arguments_uses_keywords_and_leaves_defaults_out() -> None:
    form = form_of(lambda x, y=1, *, z=None: None)
    leaves: list[Tensor] = []
    structure = form.structure(form.bind((X, 1), {"z": 3}), leaves)
    args, kwargs = form.arguments(structure, leaves)
    assert args == ()
    assert list(kwargs) == ["x", "z"]
    assert kwargs["x"] is X
    assert kwargs["z"] == 3


class Setting:
    """A value that no graph can hold."""


def test_default_that_no_graph_can_hold_stays_the_default() -> None:
    setting = Setting()

    def forward(x: Tensor, setting: Setting = setting, scale: Tensor = Y) -> tuple[Any, ...]:
        return x, setting, scale

    form = CallForm.of(forward)
    leaves: list[Tensor] = []
    structure = form.structure(form.bind((X,), {}), leaves)
    assert [parameter.default for parameter in form.parameters[1:]] == [Omitted.OMITTED] * 2
    args, kwargs = form.arguments(structure, leaves)
    assert forward(*args, **kwargs) == (X, setting, Y)


def test_positional_only_default_that_no_graph_can_hold_stays_the_default() -> None:
    setting = Setting()

    def forward(x: Tensor, setting: Setting = setting, /) -> tuple[Any, ...]:
        return x, setting

    form = CallForm.of(forward)
    leaves: list[Tensor] = []
    structure = form.structure(form.bind((X,), {}), leaves)
    args, kwargs = form.arguments(structure, leaves)
    assert forward(*args, **kwargs) == (X, setting)


def test_callable_without_signature_takes_anything() -> None:
    form = CallForm.of(min)
    assert [parameter.kind for parameter in form.parameters] == [P.VAR_POSITIONAL, P.VAR_KEYWORD]
    assert form.bind((1, 2), {"key": 3}) == [(1, 2), {"key": 3}]


def test_bind_does_not_share_state_between_calls() -> None:
    form = form_of(lambda *args, **kwargs: None)
    first = form.bind((), {"a": 1})
    assert form.bind((), {}) == [(), {}]
    assert first == [(), {"a": 1}]


@pytest.mark.parametrize("entry", [{"kind": "POSITIONAL_ONLY"}, {"name": "x", "kind": "NO_KIND"}])
def test_malformed_parameters_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        CallForm.from_json([entry])
