"""The hooks that plugins implement. Names, not classes, so that listing imports no runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs
import pluggy

if TYPE_CHECKING:
    from aitune_core.backend import Backend
    from aitune_core.results import Outcome
    from aitune_core.specs import GraphSpec

__all__ = [
    "API_VERSION",
    "PROJECT_NAME",
    "BackendReference",
    "StrategyReference",
    "hookimpl",
]

#: Pluggy's project name and the entry-point group of plugins.
PROJECT_NAME: Final = "aitune"
#: Version of the interface; a plugin states the one it was written for as ``AITUNE_API_VERSION``.
API_VERSION: Final = 1

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
#: Marks a function as an implementation of a hook.
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@attrs.frozen
class BackendReference:
    """A backend that can be imported when it is needed.

    Attributes:
        name: Name of the backend, lower case.
        target: Where the class is, as ``"package.module:Class"``.
        summary: One sentence for listings.
        requires: Importable module names that it needs, checked without importing them.
    """

    name: str
    target: str
    summary: str = ""
    requires: tuple[str, ...] = ()


@attrs.frozen
class StrategyReference:
    """A strategy that can be imported when it is needed.

    Attributes:
        name: Name of the strategy, lower case.
        target: Where the class is, as ``"package.module:Class"``.
        summary: One sentence for listings.
    """

    name: str
    target: str
    summary: str = ""


class HookSpecs:
    """All hooks."""

    @hookspec
    def aitune_register_backends(self) -> Sequence[BackendReference]:  # type: ignore[empty-body]
        """Return references to the backends of this plugin."""

    @hookspec
    def aitune_register_strategies(self) -> Sequence[StrategyReference]:  # type: ignore[empty-body]
        """Return references to the strategies of this plugin."""

    @hookspec
    def aitune_candidate_started(
        self, module_name: str, graph: GraphSpec, backend: Backend
    ) -> None:
        """Observe that a candidate is about to be built."""

    @hookspec
    def aitune_measuring_started(
        self, module_name: str, graph: GraphSpec, outcomes: Sequence[Outcome]
    ) -> None:
        """Observe that correct candidates are about to be timed beside eager."""

    @hookspec
    def aitune_candidate_finished(
        self, module_name: str, graph: GraphSpec, outcome: Outcome
    ) -> None:
        """Observe what became of a candidate."""

    @hookspec
    def aitune_tuning_finished(self, report: object) -> None:
        """Observe the `TuneReport` of a finished tuning."""
