"""``aitune backends`` and ``aitune strategies``."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import attrs
import typer

from aitune_core._cli.output import print_json, print_table, print_text, state
from aitune_core._plugins import PluginRegistry, default_registry
from aitune_core.errors import AituneError

__all__ = ["backends", "strategies"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def backends(*, json: Json = False) -> None:
    """List backends with versions and options.

    Whether libraries and devices work is what `aitune doctor` finds out.

    Example: aitune backends --json
    """
    registry = default_registry()
    rows = [
        {**attrs.asdict(info), "options": _backend_options(registry, info.name)}
        for info in registry.backend_infos()
    ]
    _show("Backends", rows, as_json=json)
    _show_missing(registry)


def strategies(*, json: Json = False) -> None:
    """List strategies with versions and options.

    Example: aitune strategies
    """
    registry = default_registry()
    rows = [
        {
            **attrs.asdict(info),
            "available": not info.reason,
            "options": _strategy_options(registry, info.name),
        }
        for info in registry.strategy_infos()
    ]
    _show("Strategies", rows, as_json=json)
    _show_missing(registry)


def _show(title: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    columns = ("name", "usable", "distribution", "what it is")
    print_table(
        title,
        columns,
        [
            (
                row["name"],
                state(good=row["available"]),
                f"{row['distribution']} {row['version']}",
                row["reason"] or row["summary"],
            )
            for row in rows
        ],
    )
    options = [
        (row["name"], option["name"], option["type"], option["default"])
        for row in rows
        for option in row["options"]
    ]
    if options:
        print_text("")
        print_table("Options", ("of", "option", "type", "default"), options)


def _show_missing(registry: PluginRegistry) -> None:
    for failure in registry.failures:
        typer.echo(f"not loaded: {failure}", err=True)


def _backend_options(registry: PluginRegistry, name: str) -> list[dict[str, str]]:
    try:
        config = registry.backend_class(name).config_class
    except AituneError:  # the reason is in the listing
        return []
    options = []
    for field in attrs.fields(config):
        default: Any = field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = None if default.takes_self else default.factory()
        options.append(_option(field.alias or field.name, field.type, default))
    return options


def _strategy_options(registry: PluginRegistry, name: str) -> list[dict[str, str]]:
    try:
        parameters = inspect.signature(registry.strategy_class(name)).parameters
    except (AituneError, ValueError):
        return []
    return [
        _option(each.name, each.annotation, each.default)
        for each in parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def _option(name: str, kind: Any, default: Any) -> dict[str, str]:  # noqa: ANN401
    missing = default in (attrs.NOTHING, inspect.Parameter.empty)
    shown = getattr(default, "value", default)
    return {
        "name": name,
        "type": kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)),
        "default": "" if missing else repr(shown),
    }
