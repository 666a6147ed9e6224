"""Memory: inputs of every layout, and many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]


class Layered(nn.Module):
    """A convolution, and a product with the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), y @ y.transpose(-1, -2) + y.sum()


@pytest.fixture(scope="module")
def layered(tune_once: Tune) -> Any:
    return tune_once(Layered(), [(torch.randn(2, 3, 6, 6), torch.randn(2, 4, 5))])


LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "contiguous": lambda: (torch.randn(2, 3, 6, 6), torch.randn(2, 4, 5)),
    "permuted": lambda: (
        torch.randn(2, 6, 6, 3).permute(0, 3, 1, 2),
        torch.randn(2, 5, 4).transpose(1, 2),
    ),
    "channels last and steps": lambda: (
        torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last),
        torch.randn(4, 4, 10)[::2, :, ::2],
    ),
    "expanded": lambda: (
        torch.randn(1, 3, 6, 6).expand(2, 3, 6, 6),
        torch.randn(1, 1, 5).expand(2, 4, 5),
    ),
    "sliced and imaginary": lambda: (
        torch.randn(2, 3, 6, 12)[..., 3:9],
        torch.view_as_complex(torch.randn(2, 4, 5, 2)).conj().imag,
    ),
    "flipped": lambda: (torch.randn(2, 3, 6, 6).flip(0, 3), torch.randn(2, 4, 5).flip(1)),
    "overlapping": lambda: (
        torch.randn(2, 3, 6, 6),
        torch.randn(12).as_strided((2, 4, 5), (1, 2, 1)),
    ),
    "with an offset": lambda: (torch.randn(3, 3, 6, 6)[1:], torch.randn(41)[1:].view(2, 4, 5)),
    "unaligned": lambda: (
        torch.randn(2, 3, 6, 6),
        torch.randn(161).view(torch.uint8)[4:-480].clone().view(torch.float32)[:40].view(2, 4, 5),
    ),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layout_of_an_input_does_not_matter(layered: Any, kind: str) -> None:
    x, y = LAYOUTS[kind]()
    with torch.no_grad():
        expected = layered.eager(x, y)
    got = layered.model(x, y)
    for one, other in zip(expected, got, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert layered.eager_calls == 0


def test_input_that_shares_memory_with_numpy_and_a_parameter(layered: Any) -> None:
    array = torch.randn(2, 4, 5).cpu().numpy()
    layered.same(torch.randn(2, 3, 6, 6), torch.from_numpy(array[..., ::1]))
    x, parameter = torch.randn(2, 3, 6, 6), nn.Parameter(torch.randn(2, 4, 5))
    with torch.no_grad():
        got = layered.model(x, parameter)
    assert torch.allclose(got[1], layered.expected(x, parameter)[1], atol=1e-4)
    assert layered.eager_calls == 0


def test_two_inputs_that_are_views_of_one_memory(tune: Tune) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 - y

    tuned = tune(Two(), [(torch.randn(n, 3), torch.randn(n, 3)) for n in (2, 6)])
    base = torch.randn(5, 3)
    got = tuned.model(base[1:], base[:-1])
    assert torch.allclose(got, base[1:] * 2 - base[:-1])


class Wide(nn.Module):
    """Enough work for threads to overlap, with an optional input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 4)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x))) + x.sum(-1, keepdim=True)
        return y if bias is None else y * bias


@pytest.fixture(scope="module")
def wide(tune_once: Tune) -> Any:
    calls: list[Any] = [torch.randn(2, 64), torch.randn(16, 64)]
    calls += [(x, torch.randn(4)) for x in calls]
    return tune_once(Wide(), calls)


def _call_from_threads(wide: Any, device: torch.device, threads: int, calls: int) -> list[Any]:
    wrong: list[Any] = []
    barrier = threading.Barrier(threads)

    def work(seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        made: Any = {"generator": generator, "device": device}
        barrier.wait()
        kept: list[tuple[Tensor, Tensor]] = []
        for index in range(calls):
            x = torch.randn(2 + (seed + index) % 15, 64, **made)
            bias = torch.randn(4, **made) if (seed + index) % 3 else None
            try:
                with torch.no_grad():
                    expected, got = wide.eager(x, bias), wide.model(x, bias)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong in a thread is a finding
                wrong.append(error)
                return
            if got.shape != expected.shape or not torch.allclose(got, expected, atol=1e-3):
                wrong.append((seed, index))
            kept.append((got, got.clone()))
        wrong.extend(seed for got, copy in kept if not torch.equal(got, copy))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return wrong


def test_sixteen_threads_share_a_tuned_module(wide: Any, device: torch.device) -> None:
    assert _call_from_threads(wide, device, threads=16, calls=200) == []
    assert wide.eager_calls == 0


def test_threads_are_served_while_another_one_tunes(wide: Any, device: torch.device) -> None:
    problems: list[BaseException] = []
    done = threading.Event()

    def tune_others() -> None:
        try:
            for width in (3, 5):
                model: Any = ait.Module(
                    nn.Linear(width, width, device=device).eval(),
                    on_miss="error",
                    strategy=ait.OneBackendStrategy("onnxruntime"),
                )
                calls = [torch.randn(rows, width, device=device) for rows in (2, 4)]
                ait.tune(model, calls, device=device)
                with torch.no_grad():
                    x = torch.randn(3, width, device=device)
                    expected = nn.functional.linear(x, model.weight, model.bias)
                    assert torch.allclose(model(x), expected, atol=1e-5)
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            problems.append(error)
        finally:
            done.set()

    tuner = threading.Thread(target=tune_others)
    tuner.start()
    rounds = 0
    while not done.is_set():
        assert _call_from_threads(wide, device, threads=4, calls=20) == []
        rounds += 1
    tuner.join()
    assert problems == []
    assert rounds > 0
    assert wide.eager_calls == 0
