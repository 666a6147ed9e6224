from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugin import empty_registry, registry
from fakes import AffineBackend, FakeBackend
from samples import Affine

from aitune_core import (
    BackendInfo,
    BackendUnavailableError,
    ConfigError,
    FirstWinsStrategy,
    Module,
    OneBackendStrategy,
    PerGraphStrategy,
    PluginConflictError,
    PluginLoadError,
    PluginLoadWarning,
    PluginRegistry,
    Strategy,
    UnknownBackendError,
    UnknownStrategyError,
    tune,
)
from aitune_core._inductor import InductorBackend

CPU = torch.device("cpu")
HEAD = """from aitune_core import BackendReference, StrategyReference, hookimpl
AITUNE_API_VERSION = 1
"""


class Distribution(metadata.Distribution):
    """An installed distribution that exists on no disk."""

    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class Folder:
    """Writes plugin modules and makes entry points of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def plugin(
        self, name: str, source: str, distribution: str | None = None, version: str = "1.0"
    ) -> metadata.EntryPoint:
        module = f"plugin_of_test_{name}"
        (self.path / f"{module}.py").write_text(source)
        entry_point = metadata.EntryPoint(name, module, "aitune")
        if distribution is not None:
            vars(entry_point).update(dist=Distribution(distribution, version))
        return entry_point


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("plugin_of_test_")]:
        monkeypatch.delitem(sys.modules, name)
    return Folder(tmp_path)


def backends(*references: str) -> str:
    listed = ", ".join(references)
    return f"{HEAD}@hookimpl\ndef aitune_register_backends():\n    return [{listed}]\n"


GOOD = backends("BackendReference('good', 'fakes:FakeBackend', 'Good.')")


BUILT_IN = {"eager", "inductor"}


def plugin_infos(found: PluginRegistry) -> list[BackendInfo]:
    return [info for info in found.backend_infos() if info.name not in BUILT_IN]


def loaded(*entry_points: metadata.EntryPoint) -> tuple[PluginRegistry, PluginLoadError]:
    with pytest.warns(PluginLoadWarning) as caught:
        found = PluginRegistry(entry_points)
    assert len(caught) == 1
    (failure,) = found.failures
    assert str(caught[0].message) == str(failure)
    return found, failure


def test_good_plugin_is_listed_and_used(folder: Folder) -> None:
    found = PluginRegistry([folder.plugin("good", GOOD, "aitune-good", "2.1")])
    (info,) = plugin_infos(found)
    assert (info.name, info.summary, info.distribution, info.version) == (
        "good",
        "Good.",
        "aitune-good",
        "2.1",
    )
    assert (info.available, info.reason) == (True, "")
    assert found.backend("good", label="x") == FakeBackend(label="x")
    assert found.failures == []


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_anywhere", ModuleNotFoundError),
        ("raise SystemExit(3)", SystemExit),
        ("raise RuntimeError('broken')", RuntimeError),
        ("def broken(:", SyntaxError),
        (
            f"{HEAD}@hookimpl\ndef aitune_register_backend():\n    return []\n",
            Exception,
        ),
        (
            f"{HEAD}@hookimpl\ndef aitune_register_backends(surplus):\n    return []\n",
            Exception,
        ),
        (GOOD.replace("= 1", "= 2"), PluginLoadError),
        (GOOD.replace("AITUNE_API_VERSION", "OTHER"), PluginLoadError),
        (backends("'good'"), PluginLoadError),
        (backends("StrategyReference('a', 'b:c')"), PluginLoadError),
        (f"{HEAD}@hookimpl\ndef aitune_register_backends():\n    return None\n", TypeError),
        (f"{HEAD}@hookimpl\ndef aitune_register_backends():\n    raise KeyError(1)\n", KeyError),
    ],
)
def test_broken_plugin_is_one_named_warning_and_the_others_work(
    folder: Folder, source: str, cause: type[BaseException]
) -> None:
    bad = folder.plugin("bad", source, "aitune-bad", "0.1")
    found, failure = loaded(bad, folder.plugin("good", GOOD))
    assert (failure.plugin, failure.distribution) == ("bad", "aitune-bad")
    assert isinstance(failure.__cause__, cause)
    assert [info.name for info in plugin_infos(found)] == ["good"]
    assert isinstance(found.backend("good"), FakeBackend)
    assert len(list(found.observers().get_plugins())) == 1


def test_missing_attribute_of_an_entry_point_is_a_failure(folder: Folder) -> None:
    entry_point = folder.plugin("bad", GOOD)
    _, failure = loaded(metadata.EntryPoint("bad", f"{entry_point.module}:nothing", "aitune"))
    assert isinstance(failure.__cause__, AttributeError)


def test_interrupt_while_loading_a_plugin_passes_through(folder: Folder) -> None:
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry([folder.plugin("slow", "raise KeyboardInterrupt")])


def test_half_registered_plugin_leaves_nothing_behind(folder: Folder) -> None:
    source = backends("BackendReference('half', 'fakes:FakeBackend')", "'not a reference'")
    found, _ = loaded(folder.plugin("half", source))
    assert plugin_infos(found) == []
    with pytest.raises(UnknownBackendError):
        found.backend("half")


def test_two_plugins_with_one_backend_name_are_an_error_naming_both(folder: Folder) -> None:
    found = PluginRegistry(
        [
            folder.plugin("one", GOOD, "aitune-one", "1.0"),
            folder.plugin("two", GOOD, "aitune-two", "2.0"),
        ]
    )
    with pytest.raises(PluginConflictError) as caught:
        found.backend("good")
    assert caught.value.plugin == "good"
    assert caught.value.distributions == ("aitune-one 1.0", "aitune-two 2.0")
    (info,) = plugin_infos(found)
    assert not info.available
    assert "aitune-one" in info.reason
    assert "aitune-two" in info.reason
    assert not found.provides(FakeBackend)


def test_one_name_twice_does_not_disable_other_backends(folder: Folder) -> None:
    other = backends("BackendReference('affine', 'fakes:AffineBackend')")
    found = PluginRegistry(
        [folder.plugin("one", GOOD), folder.plugin("two", GOOD), folder.plugin("three", other)]
    )
    assert [backend.name for backend in found.resolve(None)] == ["affine", "inductor"]


def test_unknown_backend_error_lists_names_and_failures(folder: Folder) -> None:
    found, failure = loaded(folder.plugin("bad", "1 / 0"), folder.plugin("good", GOOD))
    with pytest.raises(LookupError) as caught:
        found.backend("god")
    assert isinstance(caught.value, UnknownBackendError)
    assert caught.value.plugin == "god"
    assert caught.value.known == ("eager", "good", "inductor")
    assert caught.value.failures == (str(failure),)
    assert "ZeroDivisionError" in str(caught.value)


def test_unknown_strategy_error_lists_names() -> None:
    with pytest.raises(UnknownStrategyError) as caught:
        empty_registry().strategy("best")
    assert caught.value.known == (
        "first_wins",
        "latency_budget",
        "max_throughput",
        "min_latency",
        "one_backend",
        "per_graph",
    )
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", [None, 3, []])
def test_name_of_another_type_is_unknown(name: Any) -> None:
    with pytest.raises(UnknownStrategyError, match="known: first_wins, latency_budget"):
        empty_registry().strategy(name)
    with pytest.raises(UnknownBackendError, match="unknown backend"):
        empty_registry().backend_class(name)


def test_unknown_name_that_is_nearly_a_known_one_is_corrected() -> None:
    with pytest.raises(UnknownStrategyError, match="did you mean 'first_wins'"):
        empty_registry().strategy("fist_wins")
    with pytest.raises(UnknownBackendError, match="did you mean 'affine'"):
        registry().backend("afine")


def test_backend_whose_modules_are_missing_is_listed_with_the_reason(folder: Folder) -> None:
    reference = (
        "BackendReference('heavy', 'no.where:X', requires=('json', 'no_such_runtime', 'no.such'))"
    )
    found = PluginRegistry([folder.plugin("heavy", backends(reference), "aitune-heavy")])
    (info,) = plugin_infos(found)
    assert not info.available
    assert "no_such_runtime" in info.reason
    assert "json" not in info.reason
    with pytest.raises(BackendUnavailableError) as caught:
        found.backend("heavy")
    assert (caught.value.backend_name, caught.value.missing) == ("heavy", "no_such_runtime")
    assert caught.value.install_hint == "python -m pip install aitune-heavy"


@pytest.mark.parametrize(
    "target",
    ["no_such_module_x:Class", "fakes:NoSuch", "fakes", "fakes:Fault", "fakes:struct", ":X", ""],
)
def test_reference_to_no_backend_class_fails_when_used(folder: Folder, target: str) -> None:
    source = backends(f"BackendReference('wrong', {target!r})")
    found = PluginRegistry([folder.plugin("wrong", source, "aitune-wrong")])
    with pytest.raises(PluginLoadError) as caught:
        found.backend("wrong")
    assert caught.value.distribution == "aitune-wrong"


def test_listing_imports_no_backend_module(folder: Folder) -> None:
    (folder.path / "plugin_of_test_heavy_runtime.py").write_text("raise SystemExit('imported')")
    reference = (
        "BackendReference('h', 'plugin_of_test_heavy_runtime:X',"
        " requires=('plugin_of_test_heavy_runtime',))"
    )
    found = PluginRegistry([folder.plugin("h", backends(reference))])
    assert [info.available for info in plugin_infos(found)] == [True]
    assert "plugin_of_test_heavy_runtime" not in sys.modules
    with pytest.raises(PluginLoadError) as caught:
        found.backend("h")
    assert isinstance(caught.value.__cause__, SystemExit)


def test_resolve_takes_objects_names_and_pairs_in_order() -> None:
    mine = FakeBackend(label="mine")
    assert registry().resolve([mine, "affine", ("fake", {"label": "b"})]) == (
        mine,
        AffineBackend(),
        FakeBackend(label="b"),
    )


def test_without_names_plugins_come_by_name_then_inductor_and_never_eager(folder: Folder) -> None:
    assert [backend.name for backend in registry().resolve(None)] == ["affine", "fake", "inductor"]
    late = backends("BackendReference('zeta', 'fakes:FakeBackend')")
    found = PluginRegistry([folder.plugin("late", late)])
    # The class behind "zeta" has a name of its own.
    assert [backend.name for backend in found.resolve(None)] == ["fake", "inductor"]


@pytest.mark.parametrize("options", [None, [1], {1: 2}])
def test_options_must_map_names_to_values(options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        registry().resolve([("fake", options)])
    assert caught.value.field == "options"


def test_built_in_backends_are_listed_without_any_plugin() -> None:
    infos = empty_registry().backend_infos()
    assert [info.name for info in infos] == ["eager", "inductor"]
    assert {(info.distribution, info.available) for info in infos} == {("aitune-core", True)}
    assert empty_registry().provides(type(empty_registry().backend("inductor")))
    assert [backend.name for backend in empty_registry().resolve(None)] == ["inductor"]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_plugin_with_the_name_of_a_built_in_backend_is_a_conflict(
    folder: Folder, name: str
) -> None:
    source = backends(f"BackendReference({name!r}, 'fakes:FakeBackend')")
    found = PluginRegistry([folder.plugin("mine", source, "aitune-mine", "1.0")])
    with pytest.raises(PluginConflictError) as caught:
        found.backend(name)
    core, mine = caught.value.distributions
    assert core.startswith("aitune-core")
    assert mine == "aitune-mine 1.0"


def test_no_backend_that_can_be_used_is_unavailable_with_a_hint(folder: Folder) -> None:
    taken = backends("BackendReference('inductor', 'fakes:FakeBackend')")
    found, failure = loaded(folder.plugin("bad", "1 / 0"), folder.plugin("taken", taken))
    for resolved in (lambda: found.resolve(None), lambda: found.default_backends(CPU)):
        with pytest.raises(BackendUnavailableError) as caught:
            resolved()
        assert caught.value.install_hint is not None
        assert str(failure) in str(caught.value)


def test_default_backends_are_those_that_run_on_the_device(folder: Folder) -> None:
    heavy = backends(
        "BackendReference('heavy', 'no.where:X', requires=('no_such_runtime',))",
        "BackendReference('affine', 'fakes:AffineBackend')",
    )
    found = PluginRegistry([folder.plugin("heavy", heavy)])
    chosen, left_out = found.default_backends(CPU)
    assert [backend.name for backend in chosen] == ["affine", "inductor"]
    assert list(left_out) == ["heavy"]
    assert isinstance(left_out["heavy"], BackendUnavailableError)
    with pytest.raises(BackendUnavailableError) as caught:
        found.default_backends(torch.device("meta"))
    for name in ("affine", "heavy", "inductor"):
        assert f"\n  {name}: " in str(caught.value)


@pytest.mark.parametrize("strategy", [None, PerGraphStrategy(lambda _: FirstWinsStrategy())])
def test_tuning_without_names_says_which_backends_are_left_out(
    folder: Folder, strategy: Strategy | None
) -> None:
    heavy = backends(
        "BackendReference('heavy', 'no.where:X', requires=('no_such_runtime',))",
        "BackendReference('affine', 'fakes:AffineBackend')",
    )
    found = PluginRegistry([folder.plugin("heavy", heavy)])
    model = Module(Affine(), strategy=strategy)
    data = [torch.randn(2, 3), torch.randn(4)]
    report = tune(model, data, device="cpu", on_failure="eager", registry=found)
    (note,) = [note for note in report.modules[0].notes if "left out" in note]
    assert note.startswith("backend 'heavy' is left out: backend 'heavy' needs no_such_runtime")


def test_default_backends_leave_out_what_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(self: InductorBackend, device: torch.device) -> None:
        msg = "no compiler"
        raise BackendUnavailableError(msg)

    monkeypatch.setattr(InductorBackend, "check_available", no_compiler)
    chosen, left_out = registry().default_backends(CPU)
    assert [backend.name for backend in chosen] == ["affine", "fake"]
    assert str(left_out["inductor"]) == "no compiler"
    with pytest.raises(BackendUnavailableError, match="inductor: no compiler"):
        empty_registry().default_backends(CPU)


def test_strategies_by_name() -> None:
    found = registry()
    assert isinstance(found.strategy("first_wins"), FirstWinsStrategy)
    one = found.strategy("one_backend", backend="fake")
    assert isinstance(one, OneBackendStrategy)
    assert one.backends == ("fake",)
    with pytest.raises(ConfigError) as caught:
        found.strategy("first_wins", nonsense=1)
    assert caught.value.field == "nonsense"


def test_strategy_of_a_plugin(folder: Folder) -> None:
    source = textwrap.dedent("""
        from aitune_core import FirstWinsStrategy, StrategyReference, hookimpl
        AITUNE_API_VERSION = 1
        class Mine(FirstWinsStrategy):
            name = "mine"
        @hookimpl
        def aitune_register_strategies():
            return [StrategyReference("mine", "plugin_of_test_mine:Mine")]
    """)
    strategy = PluginRegistry([folder.plugin("mine", source)]).strategy("mine")
    assert type(strategy).__name__ == "Mine"


def test_registry_knows_which_classes_it_provides() -> None:
    class Derived(AffineBackend):
        pass

    assert registry().provides(AffineBackend)
    assert not registry().provides(Derived)
    assert not empty_registry().provides(AffineBackend)
    assert empty_registry().distribution_of("affine") == ("", "")


def test_installed_plugins_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import aitune_core as ait  # noqa: PLC0415
    from aitune_core._plugins import default_registry  # noqa: PLC0415

    calls: list[str] = []

    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        calls.append(group)
        return [metadata.EntryPoint("fakes", "fake_plugin", "aitune")]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    default_registry.cache_clear()
    try:
        names = [info.name for info in ait.available_backends()]
        assert names == ["affine", "eager", "fake", "inductor"]
        assert ait.backend("fake", label="q") == FakeBackend(label="q")
        assert isinstance(ait.strategy("first_wins"), FirstWinsStrategy)
        assert calls == ["aitune"]
    finally:
        default_registry.cache_clear()


def test_listing_installed_backends_imports_no_runtime() -> None:
    code = (
        "import sys, aitune_core; aitune_core.available_backends();"
        "print(sorted({'onnx', 'onnxruntime', 'tensorrt', 'onnxscript', 'aitune_core._inductor',"
        "'aitune_core.symbolic', 'torch._inductor.compile_fx'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "[]"


def test_loading_good_plugins_warns_of_nothing(folder: Folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PluginRegistry([folder.plugin("good", GOOD)])
