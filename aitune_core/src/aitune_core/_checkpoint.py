"""`save` and `load`: tuned modules in one file, without pickle and without code."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import torch
from torch import nn

from aitune_core._archive import (
    FileEntry,
    check_members,
    describe_file,
    extract,
    opened,
    read_manifest,
    write_archive,
)
from aitune_core._arguments import check_on_miss, checked_path
from aitune_core._cache import new_work_dir, remove_with
from aitune_core._calls import CallForm
from aitune_core._devices import existing_device, known_device
from aitune_core._discovery import distribution_version
from aitune_core._dispatch import Dispatcher, TunedGraph
from aitune_core._environment import environment_report
from aitune_core._module import Module, check_wrappable, state_of
from aitune_core._plugins import PluginRegistry, chosen_registry
from aitune_core._serving import ModuleState
from aitune_core._spec_json import graph_from_json, graph_to_json
from aitune_core._trees import TreeError
from aitune_core.backend import ArtifactReader, ArtifactWriter, checked_name
from aitune_core.errors import (
    BackendError,
    BackendUnavailableError,
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    PluginError,
    UnknownBackendError,
)
from aitune_core.specs import GraphSpec, TensorSpec

__all__ = ["load", "save"]

_FORMAT: Final = "aitune-checkpoint"
_FORMAT_VERSION: Final = 1


def save(
    model: Module, path: str | os.PathLike[str], *, registry: PluginRegistry | None = None
) -> None:
    """Save a tuned module to one file.

    The file holds the engines' files, the graph specs and a manifest; neither the module's code
    nor recorded inputs. It is written beside ``path`` and renamed, so that a file that was there
    stays whole until the new one is.

    Args:
        model: A tuned module.
        path: The file to make or replace, such as ``model.ait``.
        registry: The plugins that must be able to load it; None means the installed ones.

    Raises:
        ConfigError: ``path`` or ``registry`` cannot be used.
        CheckpointError: The module is not tuned, a type in its calls or results cannot be
            restored, a backend is of no registered plugin, or the file cannot be written.
    """
    if not isinstance(model, Module):
        msg = (
            f"save takes a module that was wrapped by aitune_core.Module and tuned, got "
            f"{type(model).__name__}; wrap and tune it first"
        )
        raise CheckpointError(msg, expected="Module", got=type(model).__name__)
    path = checked_path(path)
    registry = chosen_registry(registry)
    state = state_of(model)
    dispatcher = state.dispatcher
    if dispatcher is None or state.stale():
        msg = (
            f"module {state.name!r} is not tuned, or its weights were changed since; call "
            "aitune_core.tune before saving"
        )
        raise CheckpointError(msg, path=str(path), expected="a tuned module", got="an untuned one")
    files: dict[str, Path] = {}
    try:
        graphs = [
            _graph_entry(graph, f"modules/0/graphs/{position}", files, registry)
            for position, graph in enumerate(dispatcher.graphs)
        ]
        call_form = state.call_form.to_json()
    except TreeError as error:
        msg = f"module {state.name!r} cannot be saved: {error.path}: {error.reason}"
        raise CheckpointError(msg, path=str(path), got=error.reason) from error
    manifest = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "producer": {"aitune-core": distribution_version("aitune-core")},
        "environment": attrs.asdict(environment_report(dispatcher.device)),
        "modules": [
            {
                "name": state.name,
                "call_form": call_form,
                "device_type": dispatcher.device.type,
                "weights_sha256": _weights_hash(state.module) if _has_eager(state) else None,
                "graphs": graphs,
            }
        ],
    }
    write_archive(path, manifest, files)


def _has_eager(state: ModuleState) -> bool:
    return state.no_eager is None


def _graph_entry(
    graph: TunedGraph, folder: str, files: dict[str, Path], registry: PluginRegistry
) -> dict[str, Any]:
    engine, backend = graph.engine, graph.backend
    if not registry.provides(type(backend)):
        msg = (
            f"graph {graph.graph.name!r} runs on {type(backend).__qualname__}, which no installed "
            f"plugin registers as {backend.name!r}; a checkpoint of it could not be loaded"
        )
        raise CheckpointError(msg, expected="a registered backend", got=type(backend).__qualname__)
    distribution, version = registry.distribution_of(backend.name)
    artifacts = ArtifactWriter()
    engine.save(artifacts)
    described: dict[str, FileEntry] = {}
    for name, source in artifacts.files.items():
        files[f"{folder}/{name}"] = source
        described[name] = describe_file(source)
    return {
        "graph": graph_to_json(graph.graph),
        "backend": backend.name,
        "distribution": distribution,
        "distribution_version": version,
        "config": backend.config.to_options(),
        "data": artifacts.data,
        "files": described,
    }


def _weights_hash(module: nn.Module) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of all weights."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            flat = value.detach().reshape(-1).contiguous().cpu()
            # Not through NumPy, which torch does not bring along.
            size, address = flat.nbytes, flat.data_ptr()
            digest.update((ctypes.c_ubyte * size).from_address(address) if size else b"")
    return digest.hexdigest()


def load(
    path: str | os.PathLike[str],
    *,
    module: nn.Module | None = None,
    device: torch.device | str | None = None,
    on_miss: Literal["eager", "error"] = "eager",
    registry: PluginRegistry | None = None,
) -> Module:
    """Load a tuned module from a file that `save` wrote.

    Every file is verified before anything is read from it, and no code in it is run. Types of
    containers in calls and results are looked up in torch's pytree registry, so the module that
    registers them must be imported before.

    Args:
        path: The file.
        module: The original module, in eval mode, as eager fallback; its weights must be those
            that were tuned. None means that every miss is an error.
        device: Where to run; None means the kind of device that it was tuned on.
        on_miss: As for `Module`.
        registry: The plugins to use; None means the installed ones.

    Raises:
        ConfigError: ``module`` is in training mode, or another argument cannot be used.
        CheckpointError: The file is unreadable, was changed, is of an unknown format, or does not
            fit ``module``.
        BackendUnavailableError: A backend that it needs is not installed or cannot run here.
    """
    path = checked_path(path)
    registry = chosen_registry(registry)
    check_on_miss(on_miss)
    if device is not None:
        known_device(device)
    if module is not None:
        check_wrappable(module)
    if module is not None and module.training:
        msg = "module is in training mode, in which every call is eager; call module.eval() first"
        raise ConfigError(msg, field="module", value=type(module), allowed="a module in eval mode")
    graphs: list[TunedGraph] = []
    try:
        with opened(path) as archive:
            manifest = read_manifest(archive)
            _check_format(manifest)
        entry = _only_module(manifest)
        call_form = CallForm.from_json(entry["call_form"])
        target = _device(entry["device_type"], device, path)
        with opened(path) as archive:
            check_members(archive, _listed(manifest))
            for position, graph_entry in enumerate(entry["graphs"]):
                folder = f"modules/0/graphs/{position}"
                graph = _tuned_graph(
                    archive, folder, graph_entry, device=target, registry=registry, path=path
                )
                graphs.append(graph)
        return _attached(entry, call_form, graphs, module=module, on_miss=on_miss, path=path)
    except BaseException as error:
        for graph in graphs:
            graph.engine.close()
        problem = _checkpoint_problem(error, path)
        if problem is not None:
            raise problem from error
        raise


def _checkpoint_problem(error: BaseException, path: Path) -> CheckpointError | None:
    """Return the error for a malformed manifest; None where an error is its own explanation."""
    if isinstance(error, CheckpointError):
        error.path = str(path)
    if isinstance(error, CheckpointError | BackendError | PluginError):
        if repr(str(path)) not in str(error):
            error.args = (f"cannot load {str(path)!r}: {error}",)
        return None
    if isinstance(error, TreeError):
        reason = error.reason
    elif isinstance(error, ConfigError):
        if error.field == "module":  # the argument, not what the file says
            return None
        reason = str(error)
    elif isinstance(error, KeyError | TypeError | AttributeError | IndexError | ValueError):
        reason = f"its manifest is malformed ({error!r:.200})"
    else:
        return None
    msg = f"cannot load {str(path)!r}: {reason}"
    return CheckpointFormatError(msg, path=str(path), got=reason)


def _check_format(manifest: Mapping[str, Any]) -> None:
    version = manifest.get("format_version")
    if manifest.get("format") != _FORMAT or not isinstance(version, int):
        msg = f"the file is no aitune checkpoint: format {manifest.get('format')!r:.40}"
        raise CheckpointFormatError(msg, expected=_FORMAT, got=manifest.get("format"))
    if version != _FORMAT_VERSION:
        msg = (
            f"the checkpoint has format version {version}, this aitune-core reads "
            f"{_FORMAT_VERSION}; install a newer aitune-core"
        )
        raise CheckpointFormatError(msg, expected=_FORMAT_VERSION, got=version)


def _only_module(manifest: Mapping[str, Any]) -> dict[str, Any]:
    modules = manifest["modules"]
    if len(modules) != 1:
        msg = f"the checkpoint holds {len(modules)} modules, expected one"
        raise CheckpointFormatError(msg, expected=1, got=len(modules))
    entry: dict[str, Any] = modules[0]
    if not isinstance(entry["name"], str) or not entry["name"]:
        msg = f"the name of a module must be a non-empty string, got {entry['name']!r:.80}"
        raise CheckpointFormatError(msg, expected="a string", got=entry["name"])
    return entry


def _listed(manifest: Mapping[str, Any]) -> dict[str, FileEntry]:
    return {
        f"modules/{module}/graphs/{graph}/{name}": entry
        for module, module_entry in enumerate(manifest["modules"])
        for graph, graph_entry in enumerate(module_entry["graphs"])
        for name, entry in graph_entry["files"].items()
    }


def _device(stored: str, device: torch.device | str | None, path: Path) -> torch.device:
    try:
        return existing_device(stored if device is None else device)
    except ConfigError as error:
        msg = f"cannot load {str(path)!r}, which was tuned on {stored}: {error}"
        raise BackendUnavailableError(msg, missing=str(device or stored)) from error


def _tuned_graph(  # noqa: PLR0913
    archive: zipfile.ZipFile,
    folder: str,
    entry: Mapping[str, Any],
    *,
    device: torch.device,
    registry: PluginRegistry,
    path: Path,
) -> TunedGraph:
    name, distribution = entry["backend"], entry["distribution"]
    if not isinstance(name, str):
        msg = f"the name of a backend must be a string, got {name!r:.80}"
        raise CheckpointFormatError(msg, expected="a string", got=name)
    try:
        backend = registry.backend(name, **entry["config"])
    except (UnknownBackendError, BackendUnavailableError) as error:
        hint = f"python -m pip install {distribution}"
        msg = (
            f"cannot load {str(path)!r}: it needs backend {name!r} of {distribution} "
            f"{entry['distribution_version']}; run: {hint}"
        )
        raise BackendUnavailableError(
            msg, backend_name=name, missing=distribution, install_hint=hint
        ) from error
    backend.check_available(device)
    graph = _on_device(graph_from_json(entry["graph"]), device)
    work_dir = new_work_dir("checkpoints", f"{path.stem}-{graph.name}")
    try:
        for file_name, described in entry["files"].items():
            checked_name(file_name)
            extract(archive, f"{folder}/{file_name}", described, work_dir / file_name)
        reader = ArtifactReader(work_dir, tuple(entry["files"]), entry["data"])
        engine = backend.load(reader, graph, device)
    except BaseException:
        shutil.rmtree(work_dir, ignore_errors=True)
        raise
    remove_with(engine, work_dir)
    return TunedGraph(backend, engine)


def _on_device(graph: GraphSpec, device: torch.device) -> GraphSpec:
    """Return the graph for another device; what was on the CPU beside CUDA tensors stays there."""
    specs = (*graph.inputs, *graph.outputs)
    tuned_on = "cuda" if any(spec.device_type == "cuda" for spec in specs) else "cpu"

    def moved(spec: TensorSpec) -> TensorSpec:
        return attrs.evolve(spec, device_type=device.type) if spec.device_type == tuned_on else spec

    return attrs.evolve(
        graph,
        inputs=tuple(map(moved, graph.inputs)),
        outputs=tuple(map(moved, graph.outputs)),
    )


class LoadedModule(nn.Module):
    """Stands where a checkpoint was loaded without its module."""


def _attached(  # noqa: PLR0913
    entry: Mapping[str, Any],
    call_form: CallForm,
    graphs: list[TunedGraph],
    *,
    module: nn.Module | None,
    on_miss: Literal["eager", "error"],
    path: Path,
) -> Module:
    model = Module(
        LoadedModule().eval() if module is None else module, entry["name"], on_miss=on_miss
    )
    state = state_of(model)
    if module is None:
        state.call_form = call_form
        state.no_eager = (
            "it was loaded without its module; pass module= to aitune_core.load for an eager "
            "fallback"
        )
    else:
        _check_fits(state, call_form, entry["weights_sha256"], path)
    state.install(Dispatcher(state.call_form, graphs))
    return model


def _check_fits(
    state: ModuleState, call_form: CallForm, weights_sha256: str | None, path: Path
) -> None:
    if str(state.call_form) != str(call_form):
        msg = (
            f"{str(path)!r} does not fit the given module: it was tuned with forward{call_form}, "
            f"the module has forward{state.call_form}"
        )
        raise CheckpointError(
            msg, path=str(path), expected=str(call_form), got=str(state.call_form)
        )
    found = _weights_hash(state.module)
    if weights_sha256 is not None and found != weights_sha256:
        msg = (
            f"{str(path)!r} does not fit the given module: its weights are not those that were "
            "tuned; load them into the module first, or load without module="
        )
        raise CheckpointError(msg, path=str(path), expected=weights_sha256, got=found)
