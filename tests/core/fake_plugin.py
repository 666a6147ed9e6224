"""A plugin as a third party would write it, loaded through a hand-made entry point."""

from __future__ import annotations

from importlib import metadata

from aitune_core import BackendReference, PluginRegistry, hookimpl

AITUNE_API_VERSION = 1


@hookimpl
def aitune_register_backends() -> list[BackendReference]:
    return [
        BackendReference("affine", "fakes:AffineBackend", "Weighted sums."),
        BackendReference("fake", "fakes:FakeBackend", "Runs the module."),
    ]


def registry() -> PluginRegistry:
    """Return a registry with this plugin alone."""
    return PluginRegistry([metadata.EntryPoint("fakes", __name__, "aitune")])


def empty_registry() -> PluginRegistry:
    """Return a registry without plugins."""
    return PluginRegistry([])
