"""Answer requests from a checkpoint, in a process that knows nothing of the model's source.

`quickstart.py` runs it in a new process; it can also be run by hand::

    python serve_checkpoint.py minilm.ait requests.pt answers.pt --device cpu

``requests.pt`` holds a list of keyword arguments, each a dict of tensors, and ``answers.pt`` gets
the list of the model's outputs, as `torch.save` writes them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import aitune_core as ait


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Answer requests from a checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    return parser.parse_args()


def main() -> None:
    """Load the checkpoint, answer the requests, and write the answers down."""
    arguments = parse_arguments()
    requests = torch.load(arguments.requests, weights_only=True, map_location=arguments.device)

    start = time.perf_counter()
    model = ait.load(arguments.checkpoint, device=arguments.device)
    loaded = time.perf_counter()
    answers = [model(**request).cpu() for request in requests]
    answered = time.perf_counter()

    if "transformers" in sys.modules:
        sys.exit("serving a checkpoint has imported transformers, which it should not need")
    torch.save(answers, arguments.answers)
    print(
        f"A process without transformers loaded it in {loaded - start:.2f} s "
        f"and answered {len(answers)} requests in {answered - loaded:.2f} s."
    )


if __name__ == "__main__":
    main()
