"""``aitune tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from torch import nn

from aitune_core._cli.output import print_text
from aitune_core._cli.references import called
from aitune_core._plugins import PluginRegistry, default_registry
from aitune_core.errors import ConfigError
from aitune_core.strategy import Strategy

if TYPE_CHECKING:
    from aitune_core._tune_report import TuneReport

__all__ = ["tune"]

_REPORT_SUFFIXES: Final = (".html", ".json", ".txt")


def tune(  # noqa: PLR0913
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="Function that returns the nn.Module.")
    ],
    inputs: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Function that returns the calls, as for aitune.tune."
        ),
    ],
    *,
    strategy: Annotated[str, typer.Option(help="Name of a strategy.")] = "first_wins",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of the strategy; several times."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]", help="Backend to try; may be given several times."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to save the tuned module to.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="File for the report: .html, .json or .txt.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to tune, such as cpu or cuda.")] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Further batch size; may be given several times.")
    ] = None,
    max_calls: Annotated[int | None, typer.Option(help="Use only so many calls.")] = None,
    keep_eager: Annotated[
        bool, typer.Option("--keep-eager", help="No winner is no error: the module stays eager.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Record and report graphs, build nothing.")
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Use no builds of earlier tunings.")
    ] = False,
) -> None:
    """Tune a module, and save it with its report.

    MODULE is searched in the working directory and where Python finds modules. The exit code is 1
    where no backend wins.

    Example: aitune tune models:make --inputs models:calls --backend onnxruntime --out model.ait
    """
    registry = default_registry()
    for file, option in ((out, "--out"), (report, "--report")):
        _check_writable(file, option)
    if report is not None and report.suffix not in _REPORT_SUFFIXES:
        msg = f"--report must end in .html, .json or .txt, got {str(report)!r}"
        raise ConfigError(msg, field="report", value=str(report), allowed=_REPORT_SUFFIXES)
    chosen = _strategy(registry, strategy, backend or [], _settings("--set", setting or []))
    from aitune_core._checkpoint import save  # noqa: PLC0415 - heavy
    from aitune_core._module import Module  # noqa: PLC0415
    from aitune_core._tuning import tune as tune_module  # noqa: PLC0415

    net = called(model, "MODULE:FACTORY")
    if not isinstance(net, nn.Module):
        msg = f"{model} must return an nn.Module, got {net!r:.80}"
        raise ConfigError(msg, field="model", value=model, allowed="an nn.Module")
    wrapped = net if isinstance(net, Module) else Module(net, strategy=chosen)
    result = tune_module(
        wrapped,
        called(inputs, "--inputs"),
        strategy=chosen,
        device=device,
        batch_sizes=batch_size,
        max_calls=max_calls,
        dry_run=dry_run,
        reuse_builds=not rebuild,
        on_failure="eager" if keep_eager else "raise",
        registry=registry,
    )
    if report is not None:
        _write(result, report)
    print_text(result.summary())
    if out is not None and not dry_run:
        save(wrapped, out, registry=registry)
        print_text(f"saved: {out}")


def _check_writable(file: Path | None, option: str) -> None:
    """Find out before the tuning, which takes minutes, whether a file can be written after it."""
    if file is not None and (not file.parent.is_dir() or file.is_dir()):
        what = "is a folder" if file.is_dir() else "is in a folder that does not exist"
        msg = f"{option} {str(file)!r} {what}"
        raise ConfigError(msg, field=option, value=str(file), allowed="a file in a folder")


def _strategy(
    registry: PluginRegistry, name: str, backends: list[str], options: dict[str, Any]
) -> Strategy:
    sources = [_source(backend) for backend in backends]
    if name == "one_backend":
        if len(sources) != 1:
            msg = f"strategy one_backend takes one --backend, got {len(sources)}"
            raise ConfigError(msg, field="backend", value=backends, allowed="one")
        options["backend"] = sources[0]
    elif sources:
        options["backends"] = sources
    strategy = registry.strategy(name, **options)
    registry.resolve(strategy.backends)  # names and options are looked at before anything is made
    return strategy


def _source(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of a backend that is written ``name:option=value,...``."""
    name, _, options = text.partition(":")
    return name, _settings("--backend", options.split(",") if options else [])


def _settings(option: str, texts: list[str]) -> dict[str, Any]:
    """Return settings that are written ``name=value``, values as JSON or plain words."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            msg = f"{option}: settings are written name=value, got {text!r}"
            raise ConfigError(msg, field=option, value=text, allowed="name=value")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _write(report: TuneReport, file: Path) -> None:
    """Write a report in the format that the file's name asks for."""
    if file.suffix == ".html":
        report.to_html(file)
    else:
        text = report.to_json(indent=2) if file.suffix == ".json" else report.summary()
        file.write_text(f"{text}\n", encoding="utf-8")
