"""Saved modules: the same results from another folder, another process, without the class."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aitune_core as ait

Tune = Callable[..., Any]
Same = Callable[..., None]

DUPLICATES: tuple[Callable[[Any], Any], ...] = (
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
)
SCRIPT = """
import sys
import torch
import aitune_core as ait
model = ait.load(sys.argv[1], device=sys.argv[4])
inputs = torch.load(sys.argv[2])
torch.save([model(x) for x in inputs], sys.argv[3])
"""


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 7))


def _unpickle(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_checkpoint_moved_elsewhere_serves_a_new_process(
    tune: Tune, device: torch.device, tmp_path: Path, cache_dir: Path
) -> None:
    tuned = tune(_net(), [torch.randn(2, 300), torch.randn(5, 300)])
    inputs = [torch.randn(rows, 300) for rows in (2, 3, 5)]
    expected = [tuned.expected(x) for x in inputs]
    ait.save(tuned.model, tmp_path / "here.ait")
    del tuned
    gc.collect()
    shutil.rmtree(cache_dir, ignore_errors=True)
    (tmp_path / "there").mkdir()
    moved = shutil.move(tmp_path / "here.ait", tmp_path / "there" / "renamed.ait")
    torch.save(inputs, tmp_path / "inputs.pt")
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            SCRIPT,
            moved,
            tmp_path / "inputs.pt",
            tmp_path / "out.pt",
            str(device),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path / "there",
        env={**os.environ, "AITUNE_CACHE_DIR": str(tmp_path / "other-cache")},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    for one, other in zip(expected, _unpickle(tmp_path / "out.pt"), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


class Rich(nn.Module):
    """Numbers, containers, changed inputs, passed inputs."""

    def forward(
        self, batch: dict[str, Any], scale: float = 1.0, *, bias: Tensor | None = None
    ) -> dict[str, Any]:
        y = batch["x"][0] * scale
        batch["x"][1].add_(1)
        if bias is not None:
            y = y + bias
        return {"y": (y, None), "x": batch["x"][0], "kind": "rich", "n": 3, "e": []}


def test_loaded_module_has_every_graph_number_effect_and_miss(
    tune: Tune, same: Same, device: torch.device, tmp_path: Path
) -> None:
    def call(rows: int, scale: float, *, bias: bool) -> Any:
        batch = {"x": (torch.randn(rows, 3), torch.randn(rows))}
        return (batch, scale), {"bias": torch.randn(3)} if bias else {}

    calls = [call(r, s, bias=b) for b in (False, True) for r, s in ((2, 0.5), (5, 2.0))]
    tuned = tune(Rich(), calls)
    ait.save(tuned.model, tmp_path / "rich.ait")
    loaded: Any = ait.load(tmp_path / "rich.ait", device=device)
    for bias in (False, True):
        args, kwargs = call(4, -3.5, bias=bias)
        tuned.same(*args, **kwargs)
        batch = {"x": tuple(tensor.clone() for tensor in args[0]["x"])}
        expected = tuned.expected(*args, **kwargs)
        got = loaded(batch, args[1], **kwargs)
        same(expected, got)
        assert torch.allclose(batch["x"][1], args[0]["x"][1] + 1)
    args, kwargs = call(6, 1.0, bias=False)
    with pytest.raises(ait.InputMismatchError) as caught:
        loaded(*args, **kwargs)
    assert (caught.value.path, caught.value.got) == ("batch['x'][0]", 6)
    with pytest.raises(ait.CallFormError):
        loaded()


def test_loaded_beside_the_module_has_eager_for_misses(
    tune: Tune, device: torch.device, tmp_path: Path
) -> None:
    tuned = tune(_net(), [torch.randn(2, 300)])
    ait.save(tuned.model, tmp_path / "net.ait")
    model: Any = ait.load(tmp_path / "net.ait", module=tuned.eager, device=device)
    x = torch.randn(4, 300)
    with pytest.warns(ait.MissWarning):
        got = model(x)
    assert torch.equal(got, tuned.expected(x))
    assert torch.allclose(model(x[:2]), tuned.expected(x[:2]), atol=1e-4)


def test_checkpoint_whose_content_was_changed_is_refused(
    tune: Tune, device: torch.device, tmp_path: Path
) -> None:
    tuned = tune(_net(), [torch.randn(2, 300)])
    path = tmp_path / "net.ait"
    ait.save(tuned.model, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ait.CheckpointError) as caught:
        ait.load(path, device=device)
    assert str(path) in str(caught.value)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ait.CheckpointError):
        ait.load(path, device=device)


def test_loaded_module_cannot_be_pickled_and_says_what_to_do(
    tune: Tune, device: torch.device, tmp_path: Path
) -> None:
    tuned = tune(_net(), [torch.randn(2, 300)])
    ait.save(tuned.model, tmp_path / "net.ait")
    loaded: Any = ait.load(tmp_path / "net.ait", device=device)
    x = torch.randn(2, 300)
    for duplicate in DUPLICATES:
        try:
            other = duplicate(loaded)
        except (TypeError, ait.AituneError) as error:
            assert "save" in str(error) or "load" in str(error)
        else:
            assert torch.allclose(other(x), tuned.expected(x), atol=1e-4)


def test_provider_that_cannot_run_here_is_an_error_and_no_silent_change(tune: Tune) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for provider in ("cuda", "tensorrt"):
        with pytest.raises(ait.AituneError) as caught:
            tune(_net(), [torch.randn(2, 300)], options={"execution_provider": provider})
        assert provider in str(caught.value).lower()


@pytest.mark.cpu_only
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_not_hang(tune: Tune, tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    tuned = tune(_net(), [torch.randn(64, 300), torch.randn(32, 300)])
    ait.save(tuned.model, tmp_path / "net.ait")
    script.write_text(
        "import os, sys, torch\n"
        "import aitune_core as ait\n"
        "torch.set_num_threads(2)\n"
        "model = ait.load(sys.argv[1], device='cpu')\n"
        "x = torch.ones(64, 300)\n"
        "expected = model(x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        os._exit(0 if torch.allclose(model(x), expected, atol=1e-4) else 3)\n"
        "    except ait.AituneError as error:\n"
        "        print(error, file=sys.stderr, flush=True)\n"
        "        os._exit(0)\n"
        "    finally:\n"
        "        os._exit(4)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    # Wrong where this runs into the timeout: the child waits for threads it does not have.
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "net.ait")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_memory_stays_flat_over_many_tunings(tune: Tune) -> None:
    memory = Path("/proc/self/statm")
    if not memory.exists():
        pytest.skip("there is no /proc/self/statm to read the memory in use from")
    sizes = []
    for _ in range(12):
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
        tuned = tune(net, [torch.randn(4, 1024), torch.randn(2, 1024)])
        tuned.same(torch.randn(3, 1024))
        del net, tuned
        gc.collect()
        sizes.append(int(memory.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert sizes[-1] < 1.1 * max(sizes[:4]), [size // 2**20 for size in sizes]


@pytest.mark.slow
def test_weights_of_more_than_two_gigabytes(
    tune: Tune, device: torch.device, tmp_path: Path
) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(540_000, 1024), nn.Linear(1024, 8)

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.table(ids).mean(1))
            return y

    module = Large().eval()
    tuned = tune(
        module, [torch.randint(0, 540_000, (n, 3)) for n in (2, 4)], reference=nn.Identity()
    )
    x = torch.randint(0, 540_000, (3, 3))
    with torch.no_grad():
        expected = type(module).forward(module, x)
    assert torch.allclose(tuned.model(x), expected, atol=1e-4)
    ait.save(tuned.model, tmp_path / "large.ait")
    loaded: Any = ait.load(tmp_path / "large.ait", device=device)
    assert torch.allclose(loaded(x), expected, atol=1e-4)
