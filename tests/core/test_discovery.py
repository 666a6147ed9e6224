"""Which plugins are loaded, and what is said of those that are not."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import pytest

from aitune_core import (
    ConfigError,
    PluginConflictError,
    PluginLoadWarning,
    PluginRegistry,
    UnknownBackendError,
)

HEAD = "from aitune_core import BackendReference, hookimpl\nAITUNE_API_VERSION = 1\n"


def source(name: str, hook: str = "aitune_register_backends") -> str:
    reference = f"BackendReference({name!r}, 'fakes:FakeBackend')"
    return f"{HEAD}@hookimpl\ndef {hook}():\n    return [{reference}]\n"


@attrs.frozen
class Site:
    """A folder of installed distributions."""

    path: Path

    def install(
        self, distribution: str, plugin: str, code: str, version: str = "1.0", **files: str
    ) -> None:
        module = f"plugin_{distribution.replace('-', '_')}"
        (self.path / f"{module}.py").write_text(code)
        folder = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        facts = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (folder / "METADATA").write_text(files.get("metadata", facts))
        (folder / "entry_points.txt").write_text(f"[aitune]\n{plugin} = {module}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A folder on ``sys.path``, whose plugins are the only ones that are installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    find = metadata.entry_points

    def found(**wanted: Any) -> metadata.EntryPoints:
        entries: Any = find(**wanted)
        return metadata.EntryPoints(
            entry for entry in entries if entry.module.startswith("plugin_")
        )

    monkeypatch.setattr(metadata, "entry_points", found)
    monkeypatch.delenv("AITUNE_DISABLE_PLUGINS", raising=False)
    return Site(folder)


def names(registry: PluginRegistry) -> set[str]:
    return {info.name for info in registry.backend_infos()} - {"eager", "inductor"}


def failure(registry: PluginRegistry) -> str:
    (error,) = registry.failures
    return str(error)


def test_installed_plugins_are_found(site: Site) -> None:
    site.install("aitune-found", "found", source("found"), "3.2")
    registry = PluginRegistry()
    assert names(registry) == {"found"}
    assert registry.distribution_of("found") == ("aitune-found", "3.2")


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("", {"a", "b"}),
        ("first", {"b"}),
        ("aitune-block-b", {"a"}),
        ("Aitune_Block.B , nobody", {"a"}),
        ("first,aitune-block-b", set()),
        ("all", set()),
        ("1", set()),
    ],
)
def test_a_variable_blocks_plugins(
    site: Site, monkeypatch: pytest.MonkeyPatch, value: str, left: set[str]
) -> None:
    site.install("aitune-block-a", "first", source("a"))
    site.install("aitune-block-b", "second", source("b"))
    monkeypatch.setenv("AITUNE_DISABLE_PLUGINS", value)
    assert names(PluginRegistry()) == left


def test_an_argument_blocks_plugins_which_are_not_even_imported(site: Site) -> None:
    site.install("aitune-raises", "raises", "raise SystemExit('imported')")
    site.install("aitune-kept", "kept", source("kept"))
    registry = PluginRegistry(blocked=["raises"])
    assert names(registry) == {"kept"}
    assert registry.failures == []
    with pytest.raises(UnknownBackendError, match="plugin 'raises' of aitune-raises is blocked"):
        registry.backend("raises")


def test_the_variable_is_for_installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_plugin import registry  # noqa: PLC0415

    monkeypatch.setenv("AITUNE_DISABLE_PLUGINS", "all")
    assert names(registry()) == {"affine", "fake"}


@pytest.mark.parametrize("blocked", ["all", None, [1], [""]])
def test_what_is_blocked_must_be_names(blocked: Any) -> None:
    with pytest.raises(ConfigError, match="blocked must be names") as caught:
        PluginRegistry([], blocked=blocked)
    assert caught.value.field == "blocked"


def test_a_registry_looks_again(site: Site) -> None:
    registry = PluginRegistry()
    assert names(registry) == set()
    site.install("aitune-late", "late", source("late"))
    assert names(registry) == set()
    registry.refresh()
    assert names(registry) == {"late"}


def test_a_repaired_plugin_is_found_by_looking_again(site: Site) -> None:
    site.install("aitune-repaired", "repaired", "import plugin_needs_this")
    with pytest.warns(PluginLoadWarning, match="plugin_needs_this"):
        registry = PluginRegistry()
    assert len(registry.failures) == 1
    (site.path / "plugin_needs_this.py").write_text("")
    (site.path / "plugin_aitune_repaired.py").write_text(source("repaired") + "# repaired\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.refresh()
    assert registry.failures == []
    assert names(registry) == {"repaired"}


def test_one_name_twice_names_both_distributions_with_versions(site: Site) -> None:
    site.install("aitune-twice-a", "a", source("same"), "1.5")
    site.install("aitune-twice-b", "b", source("same"), "2.5")
    registry = PluginRegistry()
    with pytest.raises(PluginConflictError, match=r"aitune-twice-a 1\.5 and aitune-twice-b 2\.5"):
        registry.backend("same")
    (info,) = [info for info in registry.backend_infos() if info.name == "same"]
    assert info.reason == "registered by aitune-twice-a 1.5 and aitune-twice-b 2.5"


def test_another_api_version_names_both_distributions(site: Site) -> None:
    code = source("future").replace("VERSION = 1", "VERSION = 7")
    site.install("aitune-future", "future", code, "9.1")
    with pytest.warns(PluginLoadWarning):
        registry = PluginRegistry()
    assert "plugin 'future' of aitune-future 9.1" in failure(registry)
    assert f"plugin API 7, aitune-core {metadata.version('aitune-core')} has 1" in failure(registry)


@pytest.mark.parametrize("mark", ["@hookimpl\n", ""])
def test_a_misspelled_hook_is_an_error_with_the_right_name(site: Site, mark: str) -> None:
    code = source("x", "aitune_register_backend").replace("@hookimpl\n", mark)
    site.install(f"aitune-misspelled-{len(mark)}", "misspelled", code)
    with pytest.warns(PluginLoadWarning, match="did you mean 'aitune_register_backends'"):
        registry = PluginRegistry()
    assert "of aitune-misspelled" in failure(registry)


def test_a_plugin_without_hooks_is_an_error(site: Site) -> None:
    site.install("aitune-nothing", "nothing", f"{HEAD}import aitune_core\n")
    with pytest.warns(PluginLoadWarning, match="implements no hook"):
        PluginRegistry()


@pytest.mark.parametrize("text", ["", "Name: \nVersion: \n", "no metadata at all"])
def test_odd_metadata_hides_no_plugin(site: Site, text: str) -> None:
    site.install(f"aitune-odd-{len(text)}", "odd", source("odd"), metadata=text)
    site.install(f"aitune-even-{len(text)}", "even", source("even"))
    assert names(PluginRegistry()) == {"odd", "even"}
