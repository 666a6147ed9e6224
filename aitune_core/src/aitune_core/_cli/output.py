"""Tables and JSON on standard output; colours only on a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_json", "print_table", "print_text", "state"]


def print_json(data: Any) -> None:  # noqa: ANN401 - whatever is JSON-able
    """Print data as indented JSON."""
    typer.echo(json.dumps(data, indent=2))


def print_text(text: str | Text) -> None:
    """Print words as they are, wrapped at the width of the terminal."""
    _console().print(text, markup=False, highlight=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table; the last column takes the room that is left."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", ratio=None if number < len(columns) - 1 else 1)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    _console().print(table)


def state(*, good: bool) -> Text:
    """Return ``yes`` or ``no``, in a colour where there are colours."""
    return Text("yes", style="green") if good else Text("no", style="red")


def _console() -> Console:
    return Console(highlight=False)
