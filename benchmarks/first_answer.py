"""Seconds from `aitune_core.load` to the first result; run in a process of its own."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from aitune_core import load
from benchmarks.comparison import difference, tensors
from benchmarks.models import made_inputs, register_result_types
from benchmarks.options import add_case_arguments, case_of

__all__ = ["main"]


def main() -> None:
    """Load a checkpoint, call it once, check the result, and print the seconds.

    Inputs start on the CPU, so that the start of CUDA is counted; imports of this file are not.
    """
    parser = argparse.ArgumentParser()
    add_case_arguments(parser)
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--expected", required=True, type=Path, help="eager's tensors")
    arguments = parser.parse_args()
    case = case_of(arguments)
    register_result_types(case)
    inputs = made_inputs(case, small=arguments.small)
    start = time.perf_counter()
    model = load(arguments.checkpoint, device=arguments.device, on_miss="error")
    got = tensors(model(*(value.to(arguments.device) for value in inputs)))
    seconds = time.perf_counter() - start
    difference(torch.load(arguments.expected, weights_only=True), got)
    print(seconds)


if __name__ == "__main__":
    main()
