"""Failures that say in words what is asked of a backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

__all__ = ["contract", "expect"]


def expect(condition: object, words: str, found: object) -> None:
    """Fail where a condition does not hold.

    Args:
        condition: What must be true.
        words: The contract.
        found: What is there instead.
    """
    if not condition:
        pytest.fail(f"Contract: {words}.\nHere: {found}")


@contextlib.contextmanager
def contract(words: str) -> Iterator[None]:
    """Fail with the contract where the code inside raises."""
    try:
        yield
    except Exception as error:
        msg = f"Contract: {words}.\nHere: {type(error).__name__}: {error}"
        raise pytest.fail.Exception(msg) from error
