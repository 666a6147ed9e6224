"""Arguments that the processes of one row share."""

from __future__ import annotations

import argparse

from benchmarks.plan import Case

__all__ = ["add_case_arguments", "case_arguments", "case_of"]


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a parser take a case, the device and the size of models."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--batch", required=True, type=int)
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")


def case_arguments(case: Case, device: str, *, small: bool) -> list[str]:
    """Return what such a parser takes."""
    found = ["--model", case.model, "--dtype", case.dtype, "--batch", str(case.batch)]
    return [*found, "--device", device, *(["--small"] if small else [])]


def case_of(arguments: argparse.Namespace) -> Case:
    """Return the case that was given."""
    return Case(arguments.model, arguments.dtype, arguments.batch)
