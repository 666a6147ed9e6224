"""The command ``aitune``; what it needs is imported when it runs."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]

_NEEDS = ("typer", "rich")
_USAGE = 2


def main() -> None:
    """Run the command with the arguments of the process, and exit."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        hint = "python -m pip install 'aitune-core[cli]'"
        sys.stderr.write(f"error: aitune needs {' and '.join(missing)}; run: {hint}\n")
        sys.exit(_USAGE)
    from aitune_core._cli.app import app  # noqa: PLC0415

    app(prog_name="aitune")
