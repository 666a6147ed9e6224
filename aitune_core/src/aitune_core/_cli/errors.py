"""Errors of commands: what is printed, and with which exit code."""

from __future__ import annotations

import traceback
from typing import Any, Final

import typer
import typer.core

from aitune_core.errors import (
    AituneError,
    ConfigError,
    UnknownBackendError,
    UnknownStrategyError,
)

__all__ = ["BROKEN", "FAILED", "USAGE", "Group"]

#: What was asked for is not there, or not in order.
FAILED: Final = 1
#: The command was written wrongly.
USAGE: Final = 2
#: An error that aitune does not know.
BROKEN: Final = 3
_WRONG_WORDS: Final = (ConfigError, UnknownBackendError, UnknownStrategyError)


class Group(typer.core.TyperGroup):
    """Commands whose errors are one line each, without a traceback."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own types are click's
        """Run the command."""
        try:
            return super().invoke(ctx)
        except AituneError as error:
            code = USAGE if isinstance(error, _WRONG_WORDS) else FAILED
            _say(error, str(error), debug=ctx.params["debug"])
            raise typer.Exit(code) from error
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if _is_of_typer(error):
                raise
            words = f"{type(error).__name__}: {error}; --debug shows where (aitune --debug ...)"
            _say(error, words, debug=ctx.params["debug"])
            raise typer.Exit(BROKEN) from error


def _is_of_typer(error: Exception) -> bool:
    """Whether an error is one of usage, which typer shows itself."""
    return hasattr(error, "exit_code") and hasattr(error, "format_message")


def _say(error: Exception, words: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
        return
    typer.echo(f"error: {words}", err=True)
    for part in error.exceptions if isinstance(error, ExceptionGroup) else ():
        typer.echo(f"  - {type(part).__name__}: {part}", err=True)
    for note in getattr(error, "__notes__", ()):
        typer.echo(f"  {note}", err=True)
