"""`tune`: record, try candidates, let the strategy choose, install, report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import attrs
import pluggy
import torch

from aitune_core._arguments import check_strategy, check_tune_arguments
from aitune_core._candidate_report import candidate_report
from aitune_core._devices import default_device, existing_device
from aitune_core._dispatch import Dispatcher, TunedGraph
from aitune_core._environment import environment_report
from aitune_core._graphs import RecordedGraph, recorded_graphs
from aitune_core._module import Module, state_of
from aitune_core._plugins import PluginRegistry, chosen_registry
from aitune_core._progress import Progress, progress
from aitune_core._recorders import CallRecorder, EagerOnly, active, record_calls
from aitune_core._recording import ModuleRecording
from aitune_core._refusals import check_graph, check_initialised
from aitune_core._report import GraphReport, ModuleReport
from aitune_core._reuse import Builds
from aitune_core._room import check_room, naming_dims
from aitune_core._scalars import scalar_kinds
from aitune_core._serving import ModuleState
from aitune_core._tolerances import Tolerance, check_tolerance, check_tolerance_paths
from aitune_core._trial import GraphTrial
from aitune_core._tune_report import TuneReport
from aitune_core.backend import Backend, Engine
from aitune_core.errors import (
    AituneError,
    BackendUnavailableError,
    CandidateRejectedError,
    ConfigError,
    RecordingError,
    TuningError,
)
from aitune_core.results import Decision, Outcome
from aitune_core.specs import GraphSpec
from aitune_core.strategy import Strategy

__all__ = ["tune"]

#: Values of a number for which graphs are built where it cannot be an input.
_MAX_GRAPHS_BY_VALUE: Final = 8


@attrs.frozen
class _Choice:
    """How one graph is decided."""

    strategy: Strategy
    backends: tuple[Backend, ...]


@attrs.define
class _Plan:
    """One module on its way through a tuning."""

    state: ModuleState
    #: The module's name, with a number where several have the same.
    name: str
    strategy: Strategy
    choose: Callable[[GraphSpec, torch.device], _Choice]
    recorded: list[RecordedGraph]
    notes: list[str]
    tolerance: Tolerance | None = None
    builds: Builds | None = None
    #: The graphs that were decided, with their trials and decisions.
    graphs: list[RecordedGraph] = attrs.field(factory=list)
    trials: list[GraphTrial] = attrs.field(factory=list)
    decisions: list[Decision] = attrs.field(factory=list)
    choices: list[_Choice] = attrs.field(factory=list)
    start: float = attrs.field(factory=time.perf_counter)
    problem: AituneError | None = None

    @property
    def winners(self) -> list[TunedGraph]:
        """The graphs whose engines the strategy chose."""
        return [
            TunedGraph(decision.winner.backend, decision.winner.engine)
            for decision in self.decisions
            if decision.winner is not None and decision.winner.engine is not None
        ]

    def close_engines(self, *, keep: Sequence[Engine] = ()) -> None:
        """Close the engines that are not kept."""
        for trial in self.trials:
            for outcome in trial.outcomes:
                if outcome.engine is not None and outcome.engine not in keep:
                    outcome.engine.close()


def tune(  # noqa: PLR0913
    func: Callable[..., object],
    input_data: object,
    *,
    strategy: Strategy | str | None = None,
    device: torch.device | str | None = None,
    batch_sizes: Sequence[int] | None = None,
    max_calls: int | None = None,
    dry_run: bool = False,
    reuse_builds: bool = True,
    on_failure: Literal["raise", "eager"] = "raise",
    tolerance: Tolerance | None = None,
    registry: PluginRegistry | None = None,
) -> TuneReport:
    """Tune every wrapped module that ``func`` reaches.

    Nothing is changed until every module has been decided; an error leaves earlier tuned graphs
    in place. Modules in training mode are put into eval mode, and the report says so.

    Args:
        func: A `Module`, or a callable (a pipeline) that calls wrapped modules inside, in the
            calling thread.
        input_data: A tensor, one call, or an iterable of calls such as a DataLoader. A call is a
            tensor, a tuple of arguments, a mapping of keyword arguments, or ``(args, kwargs)``,
            batched as in production. Recorded tensors are kept in memory while tuning.
        strategy: How to choose, for modules that were made without one.
        device: Where to tune; for a `Module`, it and its inputs are moved there. None means CUDA
            when there is one, else the CPU; for a pipeline, where its modules are called.
        batch_sizes: Further calls with these batch sizes, made out of each call by slicing or
            repeating rows along axis 0.
        max_calls: Use only so many elements of ``input_data``; None means all.
        dry_run: Record and report graphs, build nothing, change nothing.
        reuse_builds: Whether engines of earlier tunings are used again where the module, the
            samples, options and versions are the same, and new ones are kept for later tunings.
            They are checked and measured again in any case.
        on_failure: What to do where no candidate wins: ``"raise"``, or keep ``"eager"`` and say
            so in the report.
        tolerance: Relative error that outputs may have, instead of the one that is derived: a
            number for all, or a mapping from paths of outputs, such as ``"out['logits']"``. It is
            a share of an element's size plus the typical size of its output, and is measured from
            the reference of the numeric check. Integers and booleans are equal all the same.
        registry: The plugins to use; None means the installed ones.

    Returns:
        What was done.

    Raises:
        ConfigError: An argument cannot be used, or ``tolerance`` names an unknown output.
        RecordingError: No call reached a wrapped module, or a module cannot be tuned.
        TuningError: No candidate won; holds one error per failed candidate.
        UnknownBackendError, UnknownStrategyError: A name is not registered.
        BackendUnavailableError: A named backend cannot run here.
    """
    start = time.perf_counter()
    chosen = None if device is None else existing_device(device)
    check_tune_arguments(func, batch_sizes, max_calls, on_failure)
    check_tolerance(tolerance)
    registry = chosen_registry(registry)
    builds = Builds() if reuse_builds else None
    if isinstance(strategy, str):
        registry.strategy(strategy)  # says early that there is none of this name
    with progress() as observer:
        observers = _observers(registry, observer)
        if isinstance(func, Module):
            # Names are resolved before anything runs.
            _check_tunable(state_of(func))
            check_initialised(state_of(func).name, state_of(func).module)
            _resolve(state_of(func), strategy, registry)
            chosen = chosen or default_device()
            _move(func, chosen, observer)
        recorder = CallRecorder()
        try:
            record_calls(recorder, func, input_data, batch_sizes, max_calls, chosen)
            plans = _plan(recorder, strategy, registry, on_failure)
            _allow(plans, tolerance)
            for plan in plans:
                plan.builds = builds
            device = chosen or _recorded_device(plans)
            if not dry_run:
                _decide(plans, device, observers, on_failure)
                _install(plans)
        except BaseException:
            recorder.restore_modes()
            raise
        if dry_run:
            recorder.restore_modes()
        report = TuneReport(
            modules=tuple(_module_report(plan) for plan in plans),
            device=str(device),
            environment=environment_report(device),
            seconds=time.perf_counter() - start,
            dry_run=dry_run,
        )
        observers.hook.aitune_tuning_finished(report=report)
    return report


def _check_tunable(state: ModuleState) -> None:
    if state.no_eager is not None:
        msg = f"module {state.name!r} cannot be tuned: {state.no_eager}"
        raise ConfigError(msg, field="func", value=state.name, allowed="a module with eager code")


def _observers(registry: PluginRegistry, observer: Progress) -> pluggy.PluginManager:
    """A manager for this tuning alone: the registry's plugins and the progress display."""
    manager = registry.observers()
    manager.register(observer)
    return manager


def _move(module: Module, device: torch.device, observer: Progress) -> None:
    state = state_of(module)
    state.bring_back()
    observer.say(f"{state.name}: tuning on {device}")
    tensors = [*state.module.parameters(), *state.module.buffers()]
    if any(tensor.device != device for tensor in tensors):
        state.module.to(device)


def _resolve(
    state: ModuleState, strategy: Strategy | str | None, registry: PluginRegistry
) -> _Choice:
    return _choice(state.strategy or strategy or "first_wins", registry)


def _choice(strategy: Strategy | str, registry: PluginRegistry) -> _Choice:
    check_strategy(strategy)
    if isinstance(strategy, str):
        strategy = registry.strategy(strategy)
    return _Choice(strategy, registry.resolve(strategy.backends))


def _choice_for(
    graph: GraphSpec,
    device: torch.device,
    chosen: _Choice,
    registry: PluginRegistry,
    notes: list[str],
) -> _Choice:
    """Return how a graph is decided; notes which backends cannot run, where none are named."""
    strategy = chosen.strategy.for_graph(graph)
    choice = chosen if strategy is chosen.strategy else _choice(strategy, registry)
    if choice.strategy.backends is not None:
        return choice
    try:
        backends, left_out = registry.default_backends(device)
    except BackendUnavailableError:
        return choice  # each fails with its reason
    for name, error in left_out.items():
        note = f"backend {name!r} is left out: {error}"
        if note not in notes:
            notes.append(note)
    return _Choice(choice.strategy, backends)


def _plan(
    recorder: CallRecorder,
    strategy: Strategy | str | None,
    registry: PluginRegistry,
    on_failure: str,
) -> list[_Plan]:
    plans: list[_Plan] = []
    for state, recording in recorder.recordings.items():
        chosen = _resolve(state, strategy, registry)
        name = _numbered(state.name, [plan.state.name for plan in plans])
        notes = recorder.notes[state]
        choose = functools.partial(_choice_for, chosen=chosen, registry=registry, notes=notes)
        plan = _Plan(state, name, chosen.strategy, choose, [], notes)
        if name != state.name:
            plan.notes.append(
                f"has the name {state.name!r} of another module; called {name!r} here"
            )
        shapes = state.dynamic_shapes or {}
        check_room(name, shapes, _inputs_by_path(recording))
        try:
            with active(EagerOnly()), naming_dims(name, shapes):
                plan.recorded = recorded_graphs(recording, state.dynamic_shapes)
        except RecordingError as error:
            if on_failure == "raise":
                raise
            plan.problem = error
            plan.notes.append(f"stays eager: {error}")
        plans.append(plan)
    return plans


def _allow(plans: Sequence[_Plan], tolerance: Tolerance | None) -> None:
    """Note what the user allows; raises where that names no output."""
    specs = (graph.spec for plan in plans for graph in plan.recorded)
    check_tolerance_paths(tolerance, (output.path for spec in specs for output in spec.outputs))
    for plan in plans:
        plan.tolerance = tolerance


def _numbered(name: str, earlier: Sequence[str]) -> str:
    count = earlier.count(name) + 1
    return name if count == 1 else f"{name} ({count})"


def _inputs_by_path(recording: ModuleRecording) -> Iterator[dict[str, torch.Tensor]]:
    for call in recording.calls:
        paths = recording.call_form.leaf_paths(call.call_structure)
        yield dict(zip(paths, call.inputs, strict=True))


def _recorded_device(plans: Sequence[_Plan]) -> torch.device:
    devices = {
        tensor.device
        for plan in plans
        for graph in plan.recorded
        for sample in graph.samples
        for tensor in sample
    }
    if len(devices) > 1:
        msg = (
            f"the modules were called with tensors on {sorted(map(str, devices))}; tune on one "
            "device, all inputs of a module on it"
        )
        raise ConfigError(msg, field="device", value=devices, allowed="one device")
    return devices.pop() if devices else torch.device("cpu")


def _decide(
    plans: Sequence[_Plan], device: torch.device, observers: pluggy.PluginManager, on_failure: str
) -> None:
    """Try the candidates of every graph; on an error, no engine stays open."""
    try:
        for plan in plans:
            for recorded in plan.recorded:
                _decide_family(plan, recorded, device, observers, on_failure)
    except BaseException:
        for plan in plans:
            plan.close_engines()
        raise


def _decide_family(
    plan: _Plan,
    recorded: RecordedGraph,
    device: torch.device,
    observers: pluggy.PluginManager,
    on_failure: str,
) -> None:
    """Decide a graph; where its numbers cannot be inputs, decide one graph per recorded value."""
    if not recorded.by_value:
        _decide_graph(plan, recorded, device, observers, on_failure)
        return
    _decide_graph(plan, recorded, device, observers, "eager")
    decision = plan.decisions[-1]
    if decision.winner is not None:
        return
    numbers = _changing_numbers(recorded)
    count = len(recorded.by_value)
    if count > _MAX_GRAPHS_BY_VALUE:
        plan.notes.append(
            f"{numbers}: no backend takes them as inputs, and {count} values are too many for a "
            f"graph each; these calls stay eager: {decision.reason}"
        )
        return
    plan.notes.append(
        f"{numbers}: no backend takes them as inputs; the {count} recorded values have a graph "
        "each, calls with other values run eagerly"
    )
    for graph in recorded.by_value:
        _decide_graph(plan, graph, device, observers, on_failure)


def _changing_numbers(recorded: RecordedGraph) -> str:
    inputs = recorded.spec.inputs
    places = scalar_kinds(recorded.spec.call_structure)
    paths = [repr(inputs[place].path) for place in places]
    return f"{'number' if len(paths) == 1 else 'numbers'} {', '.join(paths)}"


def _decide_graph(
    plan: _Plan,
    recorded: RecordedGraph,
    device: torch.device,
    observers: pluggy.PluginManager,
    on_failure: str,
) -> None:
    name, graph = plan.name, recorded.spec
    choice = plan.choose(graph, device)
    limits = choice.strategy.limits
    trial = GraphTrial(
        name,
        recorded,
        choice.backends,
        device,
        limits=limits,
        deadline=None if limits.time_limit_s is None else plan.start + limits.time_limit_s,
        tolerance=plan.tolerance,
        started=lambda backend: observers.hook.aitune_candidate_started(
            module_name=name, graph=graph, backend=backend
        ),
        measuring=lambda outcomes: observers.hook.aitune_measuring_started(
            module_name=name, graph=graph, outcomes=outcomes
        ),
        finished=lambda outcome: observers.hook.aitune_candidate_finished(
            module_name=name, graph=graph, outcome=outcome
        ),
        builds=plan.builds,
    )
    plan.graphs.append(recorded)
    plan.trials.append(trial)
    plan.choices.append(choice)
    with active(EagerOnly()), naming_dims(name, plan.state.dynamic_shapes or {}):
        try:
            check_graph(name, graph)
            trial.prepare()
        except RecordingError as error:
            if on_failure == "raise":
                raise
            plan.decisions.append(Decision(None, str(error)))
            return
        decision = choice.strategy.decide(trial)
    plan.decisions.append(decision)
    if decision.winner is None and on_failure == "raise":
        raise _tuning_error(plan, trial, decision)


def _tuning_error(plan: _Plan, trial: GraphTrial, decision: Decision) -> Exception:
    errors = [_loss(outcome, decision) for outcome in trial.outcomes]
    msg = (
        f"module {plan.name!r}, {trial.graph.name}: {decision.reason}; pass "
        "on_failure='eager' to keep eager"
    )
    return TuningError(msg, errors) if errors else TuningError(msg, [AituneError(decision.reason)])


def _loss(outcome: Outcome, decision: Decision) -> Exception:
    """Return why a candidate did not win, as an error."""
    if outcome.error is not None:
        return outcome.error
    name = outcome.backend.name
    if outcome.not_tried:
        msg = f"{name} was not tried: {outcome.not_tried}"
        return CandidateRejectedError(msg, backend_name=name, rule="not tried")
    msg = f"{name} is correct, but {decision.lost.get(outcome.backend, decision.reason)}"
    return CandidateRejectedError(msg, backend_name=name, rule="slower", got=outcome.speedup)


def _install(plans: Sequence[_Plan]) -> None:
    for plan in plans:
        winners = plan.winners
        plan.close_engines(keep=[graph.engine for graph in winners])
        state = plan.state
        state.install(Dispatcher(state.call_form, winners) if winners else None)
        if winners and state.after_tune == "offload":
            state.offload()
        elif winners and state.after_tune == "release":
            state.release()


def _served(winner: Outcome | None) -> GraphSpec | None:
    """The graph as its engine serves it, which may take fewer sizes."""
    return None if winner is None or winner.engine is None else winner.engine.graph


def _module_report(plan: _Plan) -> ModuleReport:
    graphs = []
    for position, recorded in enumerate(plan.graphs or plan.recorded):
        decided = position < len(plan.decisions)
        winner = plan.decisions[position].winner if decided else None
        graphs.append(
            GraphReport(
                name=recorded.spec.name,
                strategy=plan.choices[position].strategy.name if decided else plan.strategy.name,
                inputs=tuple(str(spec) for spec in recorded.spec.inputs),
                dims=tuple(str(dim) for dim in recorded.spec.dims.values()),
                samples=len(recorded.samples),
                constants=tuple(plan.state.call_form.constants(recorded.spec.call_structure)),
                conditions=tuple(map(str, (_served(winner) or recorded.spec).conditions)),
                eager=plan.trials[position].eager if decided else None,
                candidates=tuple(
                    candidate_report(outcome, plan.decisions[position])
                    for outcome in plan.trials[position].outcomes
                )
                if decided
                else (),
                winner=None if winner is None else winner.backend.name,
                reason=plan.decisions[position].reason if decided else "",
            )
        )
    return ModuleReport(
        name=plan.name,
        strategy=plan.strategy.name,
        graphs=tuple(graphs),
        notes=tuple(plan.notes),
    )
