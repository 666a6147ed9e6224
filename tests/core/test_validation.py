from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fakes import FakeBackend, FakeEngine, Fault
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import batches, mlp, recorded
from torch import Tensor, nn

from aitune_core import (
    BatchDim,
    CheckResult,
    GraphSpec,
    RecordingError,
    SizeCondition,
    ValidationError,
)
from aitune_core._graphs import RecordedGraph
from aitune_core._reference import Reference
from aitune_core._tolerances import derived_tolerance, tolerance
from aitune_core._validation import EngineCheck
from aitune_core.backend import ArtifactWriter, Attempt, BuildRequest, Engine

NAN, INF = float("nan"), float("inf")
#: Values that were not recorded: times 30 and 1000, of the other sign, zeros.
EXTREMES = 4
#: Rows in another order.
ORDERS = 1
INT_MIN, INT_MAX = -(2**63), 2**63 - 1


class ConstantEngine(Engine):
    """Returns given tensors, whatever it is called with."""

    def __init__(self, graph: GraphSpec, outputs: Sequence[Tensor]) -> None:
        super().__init__(graph, torch.device("cpu"), "constant")
        self.outputs = outputs

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [output.clone() for output in self.outputs]

    def save(self, artifacts: ArtifactWriter) -> None:
        raise NotImplementedError

    def release(self) -> None:
        pass


def checker(graph: RecordedGraph, declared: frozenset[str] = frozenset()) -> EngineCheck:
    """The check of a recorded graph."""
    reference = Reference(graph.spec, graph.samples, graph.results, graph.reference, "net")
    return EngineCheck(graph.spec, graph.samples, reference, declared)


def compare(expected: Tensor, got: Tensor) -> CheckResult:
    """Check an engine that returns ``got`` where eager returns ``expected``."""
    (graph,) = recorded(lambda x: expected.clone(), (torch.ones(2),))
    check = checker(graph)
    return check(ConstantEngine(graph.spec, [got]))


def failure(expected: Tensor, got: Tensor) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        compare(expected, got)
    assert caught.value.output == "out"
    return caught.value


def check_fake(fault: Fault, module: Any, *calls: Any, **options: Any) -> CheckResult:
    (graph,) = recorded(module, *calls, **options)
    check = checker(graph)
    return check(engine_for(graph, fault))


def engine_for(graph: Any, fault: Fault, tmp: Any = None) -> FakeEngine:
    attempts: list[Attempt] = []
    request = BuildRequest(
        module=graph.flat_module,
        graph=graph.spec,
        samples=graph.samples,
        device=torch.device("cpu"),
        work_dir=tmp,
        inputs_at=lambda _: graph.samples[0],
        check=lambda _: None,
        needed_conditions=lambda _, conditions, __: tuple(conditions),
        latencies=lambda engines: [1.0] * len(engines),
        record_attempt=attempts.append,
    )
    return FakeEngine(request, FakeBackend.name, fault)


class Two(nn.Module):
    """Two outputs of one shape, so that they can be mixed up."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"plus": x + 1, "minus": x - 1}


def test_honest_engine_passes_on_recorded_strided_and_corner_inputs() -> None:
    result = check_fake(Fault.NONE, mlp(), *((x,) for x in batches(2, 5)))
    # Recorded, strided, in another order, other values, every size from 2 to 5.
    assert result.cases == 2 + 1 + ORDERS + EXTREMES + 4
    assert result.worst_difference == 0.0
    assert result.tolerance_share == 0.0
    assert result.worst_output == "out"
    assert result.skipped == ()


@pytest.mark.parametrize(
    ("fault", "kind", "output", "case"),
    [
        (Fault.ZEROS, "values", "out['plus']", "recorded call 0"),
        (Fault.FLOAT64, "dtype", "out['plus']", "recorded call 0"),
        (Fault.SWAPPED, "values", "out['plus']", "recorded call 0"),
        (Fault.STALE, "values", "out['plus']", "recorded call 1"),
        (Fault.LARGEST, "values", "out['plus']", "maximum sizes (batch=8)"),
        (Fault.STRIDED, "values", "out['plus']", "strided inputs"),
        (Fault.WRITES, "input", "x", "recorded call 0"),
        (Fault.RAISES, "execution", None, "recorded call 0"),
        (Fault.COUNT, "count", None, "recorded call 0"),
        (Fault.SHAPE, "shape", "out['plus']", "recorded call 0"),
        (Fault.GRAD, "grad", "out['plus']", "recorded call 0"),
    ],
)
def test_liars_are_caught(fault: Fault, kind: str, output: str | None, case: str) -> None:
    calls = [(torch.rand(2, 3) + 2,), (torch.rand(2, 3) + 2,)]
    with pytest.raises(ValidationError) as caught:
        check_fake(fault, Two(), *calls, dynamic_shapes={"x": {0: BatchDim(1, 8)}})
    error = caught.value
    assert (error.kind, error.output, error.case) == (kind, output, case)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 4), (3, 1), (0, 4)])
def test_honest_engine_passes_on_inputs_of_any_size(shape: tuple[int, ...]) -> None:
    """An axis of size one may have any stride and is contiguous all the same."""
    assert check_fake(Fault.NONE, lambda x: x * 2, (torch.ones(shape),)).cases == 2 + EXTREMES


@pytest.mark.parametrize("sizes", [(4, 4), (5, 5)])
def test_stale_result_of_another_shape_is_caught(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValidationError) as caught:
        check_fake(Fault.STALE, mlp(), *((x,) for x in batches(*sizes, 2)))
    assert caught.value.kind in ("values", "shape")


def test_error_of_the_engine_is_the_cause() -> None:
    with pytest.raises(ValidationError) as caught:
        check_fake(Fault.RAISES, mlp(), *((x,) for x in batches(2)))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_counts_and_dtypes_are_facts() -> None:
    with pytest.raises(ValidationError) as caught:
        check_fake(Fault.COUNT, Two(), (torch.ones(2, 3),))
    assert (caught.value.expected, caught.value.got) == (2, 1)
    error = failure(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert (error.kind, error.expected, error.got) == ("dtype", "float32", "float64")
    error = failure(torch.ones(2), torch.ones(2, 1))
    assert (error.kind, error.expected, error.got) == ("shape", (2,), (2, 1))
    error = failure(torch.ones(2), torch.ones(2, device="meta"))
    assert (error.kind, str(error.got)) == ("device", "meta")


def test_broadcastable_shapes_are_not_equal() -> None:
    assert failure(torch.ones(2, 2), torch.ones(1, 2)).kind == "shape"
    assert failure(torch.ones(()), torch.ones(1)).kind == "shape"


def test_worst_element_is_named_with_its_place() -> None:
    expected = torch.ones(3, 4)
    got = expected.clone()
    got[0, 1], got[2, 3] = 1.5, 3.0
    error = failure(expected, got)
    assert (error.kind, error.index, error.worst_difference) == ("values", (2, 3), 2.0)
    assert (error.expected, error.got) == (1.0, 3.0)


def test_scalar_output_has_an_empty_place() -> None:
    assert failure(torch.tensor(1.0), torch.tensor(2.0)).index == ()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128])
def test_tolerance_follows_the_dtype(dtype: torch.dtype) -> None:
    expected = torch.ones(64, dtype=dtype)
    own = torch.float16 if dtype in {torch.float16, torch.bfloat16} else torch.float32
    step = derived_tolerance(dtype, torch.device("cpu"), own=own, eager_error=0.0)
    assert step <= tolerance(dtype)
    small, large = expected.clone(), expected.clone()
    small[3] += step
    large[3] += 4 * step
    assert 0.0 < compare(expected, small).tolerance_share < 1.0
    error = failure(expected, large)
    assert (error.kind, error.index) == ("values", (3,))


def test_tolerances_are_ordered_by_precision() -> None:
    assert tolerance(torch.float64) < tolerance(torch.float32) < tolerance(torch.float16)
    assert tolerance(torch.float16) < tolerance(torch.bfloat16) < tolerance(torch.float8_e4m3fn)
    assert tolerance(torch.float8_e4m3fn) < 1.0
    for dtype in (torch.int8, torch.int64, torch.bool, torch.uint8):
        assert tolerance(dtype) == 0.0


def test_small_elements_are_judged_with_the_rest_of_the_output() -> None:
    expected = torch.tensor([1.0, 0.0])
    assert compare(expected, torch.tensor([1.0, 1e-6])).worst_difference == pytest.approx(1e-6)
    assert failure(expected, torch.tensor([1.0, 1e-2])).index == (1,)
    assert failure(torch.zeros(2), torch.tensor([0.0, 1e-3])).index == (1,)


def test_float8_outputs_are_compared() -> None:
    expected = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert compare(expected, expected.clone()).worst_difference == 0.0
    assert failure(expected, torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)).index == (1,)


@pytest.mark.parametrize(
    ("expected", "got", "place"),
    [
        ([1.0, NAN], [1.0, 2.0], (1,)),
        ([1.0, 2.0], [NAN, 2.0], (0,)),
        ([1.0, INF], [1.0, -INF], (1,)),
        ([1.0, INF], [1.0, NAN], (1,)),
        ([1.0, INF], [1.0, 3e38], (1,)),
        ([1.0, 3e38], [1.0, INF], (1,)),
        ([NAN, 1.0], [1.0, NAN], (0,)),
        ([-INF, NAN], [NAN, -INF], (0,)),
    ],
)
def test_nan_and_infinity_must_be_where_eager_has_them(
    expected: list[float], got: list[float], place: tuple[int, ...]
) -> None:
    error = failure(torch.tensor(expected), torch.tensor(got))
    assert (error.kind, error.index) == ("nonfinite", place)


def test_nan_and_infinity_in_their_places_pass_and_hide_nothing() -> None:
    expected = torch.tensor([NAN, INF, -INF, 1.0])
    assert compare(expected, expected.clone()).worst_difference == 0.0
    wrong = expected.clone()
    wrong[3] = 2.0
    error = failure(expected, wrong)
    assert (error.kind, error.index, error.worst_difference) == ("values", (3,), 1.0)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (2**53, 2**53 + 1),
        (2**53 + 1, 2**53),
        (INT_MAX, INT_MAX - 1),
        (INT_MIN, INT_MAX),
        (INT_MAX, INT_MIN),
        (0, INT_MIN),
        (INT_MIN, 0),
        (-1, INT_MAX),
        (INT_MIN + 5, 5),
    ],
)
def test_integers_must_be_equal(expected: int, got: int) -> None:
    error = failure(torch.tensor([7, expected]), torch.tensor([7, got]))
    assert (error.kind, error.index, error.expected, error.got) == ("values", (1,), expected, got)


integers = st.integers(INT_MIN, INT_MAX)


@given(integers, integers)
def test_any_two_different_integers_are_told_apart(expected: int, got: int) -> None:
    assume(expected != got)
    assert failure(torch.tensor([expected]), torch.tensor([got])).kind == "values"


def test_booleans_and_bytes_must_be_equal() -> None:
    assert failure(torch.tensor([True, False]), torch.tensor([True, True])).index == (1,)
    error = failure(torch.tensor([0], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8))
    assert (error.expected, error.got) == (0, 255)
    assert compare(torch.tensor([True, False]), torch.tensor([True, False])).cases > 0


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("rest", [[0.0, 0.0], [2.0, 1.0], [-1.0, -2.0]])
def test_one_huge_element_does_not_hide_that_the_others_are_wrong(rest: list[float]) -> None:
    """Masked scores hold the lowest float32 where attention or sampling must not look."""
    error = failure(torch.tensor([LOWEST, 1.0, 2.0]), torch.tensor([LOWEST, *rest]))
    assert error.kind == "values"


def test_huge_float64_values_are_compared() -> None:
    expected = torch.tensor([1e200, 1.0], dtype=torch.float64)
    assert failure(expected, torch.zeros_like(expected)).kind == "values"


def test_empty_outputs_are_equal() -> None:
    assert compare(torch.empty(0, 3), torch.empty(0, 3)).worst_difference == 0.0
    assert failure(torch.empty(0, 3), torch.empty(0, 4)).kind == "shape"


def test_corner_sizes_that_eager_refuses_are_reported() -> None:
    def forward(x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            msg = "at most four rows"
            raise ValueError(msg)
        return x * 2

    result = check_fake(
        Fault.NONE, forward, (torch.ones(2, 3),), dynamic_shapes={"x": {0: BatchDim(1, 8)}}
    )
    assert len(result.skipped) == 4
    assert all("at most four rows" in text for text in result.skipped)
    assert [f"batch={size}" in "".join(result.skipped) for size in (5, 6, 7, 8)] == [True] * 4
    assert result.cases == 1 + 1 + EXTREMES + 4


def test_engine_that_follows_a_wrong_assumption_at_other_sizes_is_caught() -> None:
    """Doubling is right for the recorded size alone."""
    (graph,) = recorded(
        lambda x: x * x.shape[0], (torch.ones(2, 3),), dynamic_shapes={"x": {0: BatchDim(1, 4)}}
    )

    class Doubling(ConstantEngine):
        def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return [inputs[0] * 2]

    check = checker(graph)
    with pytest.raises(ValidationError) as caught:
        check(Doubling(graph.spec, []))
    assert caught.value.case == "minimum sizes (batch=1)"


class Tripling(ConstantEngine):
    """Right for eager's even sizes and for all below 100."""

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [inputs[0] * 3]


def needed(function: Callable[[Tensor], Tensor], *texts: str) -> list[str]:
    (graph,) = recorded(function, (torch.ones(2, 3),), dynamic_shapes={"x": {0: BatchDim(1, 1000)}})
    check = checker(graph)
    conditions = [SizeCondition(text) for text in texts]
    return [one.text for one in check.needed(Tripling(graph.spec, []), conditions)]


def test_condition_without_which_the_engine_is_wrong_is_needed() -> None:
    def parity(x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] % 2 == 0 or x.shape[0] < 100 else x * 2

    assert needed(parity, "batch % 2 == 0 or batch < 100") == ["batch % 2 == 0 or batch < 100"]
    assert needed(parity, "batch % 4 == 0", "batch % 2 == 0") == ["batch % 2 == 0"]
    assert needed(parity, "batch < 100", "batch < 90 + 2 * 5") == ["batch < 100"]
    assert needed(lambda x: x * 3, "batch % 2 == 0", "batch != 77", "batch < 90") == []


def test_condition_whose_breaking_sizes_eager_refuses_is_needed() -> None:
    def even(x: Tensor) -> Tensor:
        return x.view(len(x) // 2, 2, 3).flatten(0, 1) * 3

    assert needed(even, "batch % 2 == 0") == ["batch % 2 == 0"]


def test_engine_that_serves_a_declared_range_in_part_is_refused() -> None:
    (graph,) = recorded(
        lambda x: x * 3, (torch.ones(2, 3),), dynamic_shapes={"x": {0: BatchDim(1, 9)}}
    )
    check = checker(graph, graph.declared)
    for text in ("batch <= 8", "batch > 1"):
        engine = Tripling(graph.spec, [])
        engine.limit_sizes([SizeCondition(text)])
        with pytest.raises(ValidationError, match=rf"batch\[1..9\] .* sizes with {text}") as caught:
            check(engine)
        assert (caught.value.kind, caught.value.expected) == ("sizes", "batch[1..9]")
    engine = Tripling(graph.spec, [])
    engine.limit_sizes([SizeCondition("batch % 2 == 1 or batch == 2")])
    assert check(engine).skipped


def test_engine_with_limits_is_checked_inside_of_them_alone() -> None:
    def parity(x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] % 2 == 0 else x * 2

    def check(rows: int) -> CheckResult:
        (graph,) = recorded(
            parity, (torch.ones(rows, 3),), dynamic_shapes={"x": {0: BatchDim(1, 4)}}
        )
        engine = Tripling(graph.spec, [])
        engine.limit_sizes([SizeCondition("batch % 2 == 0")])
        return checker(graph)(engine)

    result = check(2)
    assert result.cases == 1 + 1 + EXTREMES + 2
    assert len(result.skipped) == 2
    assert all("the engine takes sizes with batch % 2 == 0" in text for text in result.skipped)
    with pytest.raises(
        ValidationError, match=r"batch % 2 == 0, and recorded call 0 has batch = 3"
    ) as caught:
        check(3)
    assert caught.value.kind == "sizes"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: nn.functional.dropout(x, 0.5, training=True),
        lambda x: x + torch.rand(3),
        torch.rand_like,
    ],
)
def test_eager_that_is_not_repeatable_is_refused(function: Any) -> None:
    (graph,) = recorded(lambda x: {"y": function(x)}, (torch.ones(20, 3),))
    reference = Reference(graph.spec, graph.samples, graph.results, graph.reference, "net")
    with pytest.raises(RecordingError) as caught:
        reference.cases()
    assert (caught.value.module_name, caught.value.path) == ("net", "out['y']")


def test_engine_that_writes_does_not_spoil_the_check_of_the_next() -> None:
    (graph,) = recorded(mlp(), *((x,) for x in batches(2, 3)))
    check = checker(graph)
    before = [sample[0].clone() for sample in graph.samples]
    with pytest.raises(ValidationError):
        check(engine_for(graph, Fault.WRITES))
    assert check(engine_for(graph, Fault.NONE)).worst_difference == 0.0
    for sample, copy in zip(graph.samples, before, strict=True):
        assert torch.equal(sample[0], copy)


def test_changed_inputs_are_checked_as_outputs() -> None:
    def forward(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return x * 2

    call = (torch.full((2,), 3.0), torch.ones(2))
    assert check_fake(Fault.NONE, forward, call).worst_difference == 0.0
    with pytest.raises(ValidationError) as caught:
        check_fake(Fault.ZEROS, lambda x, cache: cache.add_(x).new_zeros(2), call)
    assert caught.value.output == "cache"


def test_module_without_outputs_is_compared_by_what_it_changes() -> None:
    def forward(x: Tensor) -> None:
        x.neg_()

    assert check_fake(Fault.NONE, forward, (torch.ones(2),)).worst_output == "x"
    with pytest.raises(ValidationError):
        check_fake(Fault.ZEROS, forward, (torch.ones(2),))


class Tells(nn.Module):
    """Says in words how many rows it got."""

    def forward(self, x: Tensor) -> Any:
        return {"y": x * 2, "kind": "long" if x.shape[0] > 2 else "short"}


def test_results_whose_words_change_with_sizes_need_a_condition() -> None:
    (graph,) = recorded(Tells(), (torch.ones(2, 3),), dynamic_shapes={"x": {0: BatchDim(1, 4)}})
    engine = engine_for(graph, Fault.NONE)
    condition = SizeCondition("batch <= 2")
    with pytest.raises(ValidationError, match="is 'short' in the recorded calls") as caught:
        checker(graph)(engine)
    error = caught.value
    assert (error.kind, error.output) == ("structure", "out['kind']")
    assert (error.expected, error.got) == ("'short'", "'long'")
    assert checker(graph).needed(engine, [condition]) == (condition,)
    engine.limit_sizes([condition])
    assert len(checker(graph)(engine).skipped) == 2


def test_results_whose_words_change_with_values_are_refused() -> None:
    def forward(x: Tensor) -> Any:
        return x + 1, bool((x > 0).any())

    with pytest.raises(ValidationError) as caught:
        check_fake(Fault.NONE, forward, (torch.ones(2),))
    assert (caught.value.kind, caught.value.output) == ("structure", "out[1]")


def test_lists_that_grow_with_sizes_are_refused() -> None:
    def forward(x: Tensor) -> Any:
        return list(x.unbind(0))

    with pytest.raises(ValidationError, match="absent") as caught:
        check_fake(
            Fault.NONE, forward, (torch.ones(2, 3),), dynamic_shapes={"x": {0: BatchDim(1, 4)}}
        )
    assert caught.value.kind == "structure"


class Overflows(Engine):
    """Computes the logarithm of a sum of exponentials as on paper."""

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [inputs[0].exp().sum(-1).log()]

    def save(self, artifacts: ArtifactWriter) -> None:
        raise NotImplementedError

    def release(self) -> None:
        pass


def test_formulas_that_overflow_at_large_values_are_caught() -> None:
    (graph,) = recorded(lambda x: x.logsumexp(-1), (torch.rand(2, 3),))
    with pytest.raises(ValidationError) as caught:
        checker(graph)(Overflows(graph.spec, torch.device("cpu"), "overflows"))
    assert (caught.value.kind, caught.value.case) == ("nonfinite", "inputs times 1000")


def test_what_hangs_on_rounding_at_large_values_is_no_fault() -> None:
    (graph,) = recorded(lambda x: (x * 3).sin(), (torch.rand(2, 3),))

    class Rounds(Overflows):
        def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return [(inputs[0] * (3 + 2e-6)).sin()]

    result = checker(graph)(Rounds(graph.spec, torch.device("cpu"), "rounds"))
    assert result.cases == 2 + ORDERS + EXTREMES


class Cuts(Overflows):
    """A sigmoid that gives 0 below some value."""

    def __init__(self, graph: GraphSpec, cut: float) -> None:
        super().__init__(graph, torch.device("cpu"), "cuts")
        self.cut = cut

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        values = inputs[0].sigmoid()
        return [torch.where(values < self.cut, 0.0, values)]


def test_saturated_values_may_be_off_by_the_rounding_of_one_where_nothing_was_recorded() -> None:
    (graph,) = recorded(torch.sigmoid, (torch.tensor([-0.6, -0.61, -0.62]),))
    assert checker(graph)(Cuts(graph.spec, 5e-7)).cases == 2 + ORDERS + EXTREMES
    (graph,) = recorded(torch.sigmoid, (torch.tensor([-0.40, -0.41]),))
    with pytest.raises(ValidationError) as caught:
        checker(graph)(Cuts(graph.spec, 1e-5))
    assert (caught.value.kind, caught.value.case) == ("values", "inputs times 30")
    (graph,) = recorded(torch.sigmoid, (torch.tensor([-18.0, -18.1]),))
    with pytest.raises(ValidationError) as caught:
        checker(graph)(Cuts(graph.spec, 1e-7))
    assert caught.value.case == "recorded call 0"
