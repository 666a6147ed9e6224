"""One test per model family: what is tuned gives eager's numbers at sizes nobody recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the sweep needs transformers: nox -s sweep")

from .families import FAMILIES
from .family import Family
from .outcome import sweep

pytestmark = [
    pytest.mark.slow,
    # nn.Transformer gives it about its own encoder when sequences run along the first axis.
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


def test_names_are_unique() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("position", "family"), list(enumerate(FAMILIES)), ids=[family.name for family in FAMILIES]
)
def test_tuned_family_gives_eager_numbers(
    position: int,
    family: Family,
    add_row: Callable[[int, Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = sweep(family, monkeypatch)
    add_row(position, outcome)
    assert not outcome.failure
