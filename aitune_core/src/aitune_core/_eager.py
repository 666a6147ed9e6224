"""The module itself as a backend, to be named among others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor, nn

from aitune_core._owned import inference, owned, state_memory
from aitune_core.backend import ArtifactReader, ArtifactWriter, Backend, BuildRequest, Engine
from aitune_core.config import BackendConfig
from aitune_core.errors import CheckpointError
from aitune_core.specs import GraphSpec

__all__ = ["EagerBackend", "EagerConfig", "EagerEngine"]

_NAME = "eager"


@attrs.frozen(kw_only=True)
class EagerConfig(BackendConfig):
    """Eager has no options."""


class EagerEngine(Engine):
    """Runs the module's own Python code.

    Args:
        graph: The graph.
        device: Where the module is.
        module: The module on flat tensors.
    """

    def __init__(self, graph: GraphSpec, device: torch.device, module: nn.Module) -> None:
        super().__init__(graph, device, _NAME)
        self._module: nn.Module | None = module
        self._memory = state_memory(module)

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the module; its inputs are copied inside.

        Raises:
            EngineClosedError: The engine was closed.
        """
        module = self._module  # held until the run is over, so that close() may come meanwhile
        if module is None:
            self.fail_closed("run")
        with inference(self.device):
            return owned(module(*inputs), inputs, self._memory)

    def save(self, artifacts: ArtifactWriter) -> None:  # noqa: ARG002
        """Refuse.

        Raises:
            CheckpointError: Always; a checkpoint holds no Python code.
        """
        msg = (
            f"graph {self.graph.name!r} runs eagerly, which is the module's Python code, and a "
            "checkpoint holds none; tune with a backend that can be stored, such as "
            "'onnxruntime', or keep the module's own weights with torch.save"
        )
        raise CheckpointError(msg, expected="an engine that can be stored", got=_NAME)

    def release(self) -> None:
        """Let the module go."""
        self._module = None


class EagerBackend(Backend):
    """Offers the module as it is, in lists of candidates by name: ``"eager"``."""

    name: ClassVar[str] = _NAME
    config_class: ClassVar[type[BackendConfig]] = EagerConfig

    def check_available(self, device: torch.device) -> None:
        """Find nothing missing: eager runs wherever the module does."""

    def build(self, request: BuildRequest) -> EagerEngine:
        """Return the request's module as an engine."""
        return EagerEngine(request.graph, request.device, request.module)

    def load(
        self,
        artifacts: ArtifactReader,  # noqa: ARG002
        graph: GraphSpec,
        device: torch.device,  # noqa: ARG002
    ) -> EagerEngine:
        """Refuse.

        Raises:
            CheckpointError: Always; none is ever stored.
        """
        msg = (
            f"eager engines are not stored, so none can be loaded for graph {graph.name!r}; tune "
            "the module again"
        )
        raise CheckpointError(msg, expected="a stored engine", got=_NAME)
