"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from aitune_core._cli.benching import bench
from aitune_core._cli.doctor import doctor
from aitune_core._cli.errors import Group
from aitune_core._cli.listing import backends, strategies
from aitune_core._cli.output import print_text
from aitune_core._cli.tuning import tune
from aitune_core._discovery import distribution_version

__all__ = ["app"]

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (doctor, backends, strategies, tune, bench):
    app.command()(command)


def _show_version(*, wanted: bool) -> None:
    if wanted:
        print_text(f"aitune-core {distribution_version('aitune-core')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            is_eager=True,
            callback=lambda value: _show_version(wanted=value),
        ),
    ] = False,
) -> None:
    """Find the fastest correct executable for a PyTorch module.

    Exit codes: 0 all is well; 1 what was asked for failed; 2 the command is wrong; 3 an unexpected
    error.
    """
