"""``aitune bench``: a checkpoint beside eager or another checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import attrs
import torch
import typer

from aitune_core._cli.output import print_json, print_table, print_text
from aitune_core._cli.references import called
from aitune_core._devices import existing_device
from aitune_core._inputs import Call, calls_of, to_device
from aitune_core._measurement import Contest, Executable
from aitune_core._module import Module, state_of
from aitune_core._stopwatch import stopwatch_for
from aitune_core.errors import ConfigError

__all__ = ["bench"]


@attrs.frozen
class _Timed:
    name: str
    call: Callable[..., Any]


def bench(  # noqa: PLR0913
    file: Annotated[Path, typer.Argument(help="A checkpoint.")],
    inputs: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Function that returns the calls.")
    ],
    *,
    eager: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="Function that returns the module itself."),
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Another checkpoint.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, such as cpu or cuda.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time to measure for.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a checkpoint beside the eager module, or beside another checkpoint.

    The two take turns, so that drift of the machine falls on both. Every call must be served by an
    engine of the checkpoint.

    Example: aitune bench model.ait --inputs models:calls --eager models:make
    """
    if (eager is None) == (against is None):
        msg = "aitune bench compares with --eager MODULE:FACTORY or with --against FILE; give one"
        raise ConfigError(msg, field="eager", value=None, allowed="one of the two")
    from aitune_core._checkpoint import load  # noqa: PLC0415 - heavy

    target = None if device is None else existing_device(device)
    tuned = load(file, device=target, on_miss="error")
    target = target or _device_of(tuned)
    if against is not None:
        baseline = _Timed(str(against), load(against, device=target, on_miss="error"))
    else:
        baseline = _Timed("eager", called(str(eager), "--eager").eval().to(target))
    calls = [to_device(call, target) for call in calls_of(called(inputs, "--inputs"), None)]
    if not calls:
        msg = f"{inputs} returned no calls"
        raise ConfigError(msg, field="inputs", value=inputs, allowed="at least one call")
    timed = [baseline, _Timed(str(file), tuned)]
    contest = Contest([_executable(one, calls) for one in timed], stopwatch_for(target))
    with torch.no_grad():
        for one in timed:
            one.call(*calls[0][0], **calls[0][1])  # errors are shown as they are
        contest.run(seconds)
    _show(timed, contest, as_json=json)


def _show(timed: list[_Timed], contest: Contest, *, as_json: bool) -> None:
    for place in range(len(timed)):
        error = contest.error(place)
        if error is not None:
            raise error
    found = [contest.measurement(place) for place in range(len(timed))]
    ratio = contest.ratio(1, 0)
    if as_json:
        rows = [
            {
                "name": one.name,
                "p50_ms": each.p50_ms,
                "p90_ms": each.p90_ms,
                "p99_ms": each.p99_ms,
                "calls": each.calls,
            }
            for one, each in zip(timed, found, strict=True)
        ]
        print_json({"rows": rows, "speedup": attrs.asdict(ratio)})
        return
    print_table(
        "Milliseconds per call",
        ("what", "median", "p90", "p99", "calls"),
        [
            (
                one.name,
                f"{each.p50_ms:.3f}",
                f"{each.p90_ms:.3f}",
                f"{each.p99_ms:.3f}",
                str(each.calls),
            )
            for one, each in zip(timed, found, strict=True)
        ],
    )
    print_text(
        f"\n{timed[1].name} is {ratio.value:.2f} times as fast as {timed[0].name} "
        f"({ratio.low:.2f} to {ratio.high:.2f} at {ratio.confidence:.0%} confidence, "
        f"{ratio.rounds} rounds)"
    )


def _executable(timed: _Timed, calls: list[Call]) -> Executable:
    def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: timed.call(*args, **kwargs)

    return Executable([bound(*call) for call in calls], [1] * len(calls))


def _device_of(model: Module) -> torch.device:
    dispatcher = state_of(model).dispatcher
    return torch.device("cpu") if dispatcher is None else dispatcher.device
