from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import mlp, recorded
from torch import Tensor, nn

from aitune_core import BatchDim, RecordingError
from aitune_core._reference import Case, Reference

X = torch.tensor([[0.5, -1.0], [2.0, 0.25]])


def reference_of(module: Any, *calls: Any, **options: Any) -> Reference:
    (graph,) = recorded(module, *calls, **options)
    reference = Reference(graph.spec, graph.samples, graph.results, graph.reference, "net")
    reference.cases()
    return reference


def labelled(reference: Reference, label: str) -> Case:
    (case,) = (case for case in reference.cases() if case.label == label)
    return case


def exact(case: Case, position: int = 0) -> Tensor:
    """Eager's output with what it lacks."""
    assert case.correction is not None
    assert not isinstance(case.reference, Exception)
    lacking = case.correction.tensors[position]
    output = case.reference[position].double()
    return output if lacking is None else output + lacking.double()


def test_eager_and_what_it_lacks_is_what_float64_gives() -> None:
    module = mlp()
    reference = reference_of(module, (torch.randn(3, 4),), (torch.randn(5, 4),))
    assert reference.name == "float64"
    assert reference.own is torch.float32
    assert reference.skipped == []
    wide = mlp()
    wide.load_state_dict(module.state_dict())
    wide.double()
    for case in reference.cases():
        expected = wide(case.inputs[0].double())
        assert case.correction is not None
        assert 0.0 < case.correction.errors[0] < 1e-6
        # What eager lacks is a small number, kept with few digits.
        off = (exact(case) - expected).abs().max()
        assert off < 0.02 * case.correction.errors[0] * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_judged_by_float32(dtype: torch.dtype) -> None:
    reference = reference_of(mlp().to(dtype), (torch.randn(3, 4).to(dtype),))
    assert reference.name == "float32"
    case = reference.cases()[0]
    assert case.correction is not None
    assert torch.finfo(dtype).eps / 20 < case.correction.errors[0] < 10 * torch.finfo(dtype).eps


def test_float64_and_integers_are_their_own_reference() -> None:
    for x in (X.double(), torch.arange(6).reshape(2, 3)):
        reference = reference_of(lambda x: x * 3, (x,))
        assert reference.name == "eager"
        assert all(case.correction is None for case in reference.cases())
        assert reference.skipped == []


def test_module_is_as_it_was() -> None:
    class Notes(nn.Module):
        """Keeps what it made: once, and at each call."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.tables: dict[Any, Tensor] = {}
            self.last: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            key = (x.shape[0], x.dtype)
            if key not in self.tables:
                self.tables[key] = torch.arange(x.shape[0], dtype=x.dtype)[:, None] / 10
            self.last.append(x.shape[0])
            result: Tensor = self.layer(x) + self.tables[key]
            return result

    module = Notes()
    weight = module.layer.weight
    reference = reference_of(module, (X,), dynamic_shapes={"x": {0: BatchDim(1, 4)}})
    assert reference.name == "float64"
    assert module.layer.weight is weight
    assert weight.dtype is torch.float32
    assert {table.dtype for table in module.tables.values()} == {torch.float32}
    assert {dtype for _, dtype in module.tables} == {torch.float32}


def test_wide_tensors_that_code_keeps_outside_of_the_module_are_noticed() -> None:
    kept: dict[int, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        if x.element_size() > 4:
            kept[0] = x + 0.0
        return x * 2 + 0 * kept.get(0, torch.zeros(()))

    with pytest.raises(RecordingError, match="after it ran in a wider type"):
        reference_of(forward, (X,))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.view(torch.int32) + 1, "the bits of a floating-point number are read"),
        (lambda x: (x * 1e-9 + 1 - 1) * 1e9, "eager's 'out' differs by a share"),
        (lambda x: x * 1e-9 + 1 > 1, "'out' is not equal, in bool"),
        (lambda x: x * 1e30 * 1e30 / 1e30, "NaN or infinity are elsewhere in 'out'"),
    ],
)
def test_eager_is_the_reference_where_a_wider_type_is_none(function: Any, reason: str) -> None:
    reference = reference_of(function, (X,))
    assert reference.name == "eager"
    case = reference.cases()[0]
    assert case.correction is None
    (sentence,) = (text for text in reference.skipped if case.label in text)
    assert f"eager itself is the reference, since in float64 {reason}" in sentence


def test_error_in_the_wider_type_is_told() -> None:
    def forward(x: Tensor) -> Tensor:
        if x.element_size() > 4:
            msg = "only small elements"
            raise TypeError(msg)
        return x * 2

    reference = reference_of(forward, (X,))
    assert reference.name == "eager"
    assert "raises TypeError: only small elements" in reference.skipped[0]


def test_module_that_cannot_be_copied_is_its_own_reference() -> None:
    class Uncopied(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

        def __deepcopy__(self, memo: Any) -> Any:
            msg = "holds a lock"
            raise TypeError(msg)

    reference = reference_of(Uncopied(), (X,))
    assert reference.name == "eager"
    assert "holds a lock" in reference.skipped[0]


def test_only_the_cases_without_a_wider_reference_are_named() -> None:
    """Only inputs times 1000 overflow float32."""
    reference = reference_of(lambda x: x.pow(16).pow(1 / 16), (X,))
    assert reference.name == "float64"
    assert labelled(reference, "recorded call 0").correction is not None
    assert labelled(reference, "inputs times 1000").correction is None
    (sentence,) = reference.skipped
    assert sentence.startswith("inputs times 1000: eager itself is the reference")


def test_overflow_in_both_types_is_no_error() -> None:
    reference = reference_of(lambda x: x.abs() * torch.tensor([1e38, 10.0]) * 100, (X,))
    case = labelled(reference, "recorded call 0")
    assert case.correction is not None
    assert case.correction.errors[0] < 1e-6


def test_rows_in_another_order_are_compared_too() -> None:
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    reference = reference_of(lambda ids, mask: ids * mask, (ids, mask))
    case = labelled(reference, "rows in another order")
    assert case.inputs[0].tolist() == [[5, 6], [1, 2], [3, 4]]
    assert case.inputs[1].tolist() == [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    assert not case.recorded
    assert not case.extreme


def test_order_that_eager_refuses_is_reported() -> None:
    def forward(x: Tensor, lengths: Tensor) -> Tensor:
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data

    reference = reference_of(forward, (torch.ones(2, 3, 1), torch.tensor([3, 1])))
    assert any(text.startswith("rows in another order: eager raised") for text in reference.skipped)


def test_empty_inputs_are_compared_where_a_range_includes_zero() -> None:
    reference = reference_of(lambda x: x.sum(1), (X,), dynamic_shapes={"x": {0: BatchDim(0, 4)}})
    case = labelled(reference, "minimum sizes (batch=0)")
    assert case.inputs[0].shape == (0, 2)
    assert case.correction is not None
