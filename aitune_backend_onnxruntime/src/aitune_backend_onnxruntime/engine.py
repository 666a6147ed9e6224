"""The engine: a session with its files, behind the core's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from aitune_backend_onnxruntime.binding import CpuRunner, Runner
from aitune_backend_onnxruntime.config import ONNXExecutionProvider, Precision
from aitune_backend_onnxruntime.cuda_binding import CudaRunner
from aitune_backend_onnxruntime.engine_tables import Copies, copies_in, copies_table, nodes_table
from aitune_backend_onnxruntime.errors import BACKEND_NAME
from aitune_backend_onnxruntime.graph_binding import GraphRunner
from aitune_backend_onnxruntime.graphs import GraphRefusedError
from aitune_backend_onnxruntime.providers import (
    cuda_options,
    matmul_tf32_allowed,
    provider_list,
    tensorrt_options,
)
from aitune_backend_onnxruntime.session import check_placement, open_session, session_setup
from aitune_core.backend import Engine, EngineTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from aitune_backend_onnxruntime.model_file import ModelFacts
    from aitune_backend_onnxruntime.session_trial import SessionTrial
    from aitune_core.backend import ArtifactWriter
    from aitune_core.specs import GraphSpec

__all__ = ["ExportedModel", "ONNXRuntimeEngine", "open_engine"]


@attrs.frozen
class RewrittenModel:
    """A model file that computes the same as another one, with its weights.

    Attributes:
        path: The file, in the folder of the other one.
        facts: What it says about itself.
    """

    path: Path
    facts: ModelFacts


@attrs.frozen(kw_only=True)
class ExportedModel:
    """A model on disk, where it came from, and how a session on CUDA is made of it.

    Attributes:
        path: The model file; files with its weights lie next to it.
        facts: What it says about itself.
        exporter: ``"dynamo"`` or ``"tracer"``.
        options: Options of the configuration that it was built with.
        rewritten: The model with operators that are faster on CUDA; None where there are none.
        uses_rewritten: Whether sessions on CUDA use that.
        channels_last: Whether convolutions on CUDA work on channels last.
    """

    path: Path
    facts: ModelFacts
    exporter: str
    options: Mapping[str, Any]
    rewritten: RewrittenModel | None = None
    uses_rewritten: bool = False
    channels_last: bool = False


class ONNXRuntimeEngine(Engine):
    """An ONNX Runtime session for one graph.

    Args:
        graph: The graph that the engine was built for.
        device: Where it runs.
        model: The model that the session was made from; its files must outlive the engine.
        provider: What executes it.
        runner: The session, ready to run.
        placement: Number of nodes per ONNX Runtime provider name.
        nodes: The same in detail, for the report.
        copies: Copies between devices; None where they are not known.
    """

    def __init__(  # noqa: PLR0913 - all but two by keyword
        self,
        graph: GraphSpec,
        device: torch.device,
        *,
        model: ExportedModel,
        provider: ONNXExecutionProvider,
        runner: Runner,
        placement: Mapping[str, int],
        nodes: EngineTable,
        copies: Sequence[Copies] | None,
    ) -> None:
        super().__init__(graph, device, BACKEND_NAME)
        precision = model.options["precision"]
        if precision is not None:
            self.compute_dtype = Precision(precision).dtype
        self.model = model
        self.provider = provider
        self.placement = dict(placement)
        self.copies = copies
        self._nodes = nodes
        self._runner: Runner | None = runner
        self._graph_sizes: list[dict[str, int]] = []
        self._refusals: list[str] = []

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run on inputs that are known to fit the graph.

        Args:
            inputs: One tensor per entry of ``graph.inputs``, in order; any strides.

        Returns:
            One contiguous tensor per entry of ``graph.outputs``, in order; the caller's own.

        Raises:
            EngineClosedError: The engine was closed.
            EngineRunError: ONNX Runtime failed.
        """
        runner = self._runner  # held until the run is over, so that close() may come meanwhile
        if runner is None:
            self.fail_closed("run")
        return runner.run(inputs)

    @property
    def graph_sizes(self) -> list[dict[str, int]]:
        """Sizes of the dims for which CUDA graphs were captured in advance."""
        return list(self._graph_sizes)

    @property
    def can_have_graphs(self) -> bool:
        """Whether calls may be replayed from CUDA graphs."""
        return isinstance(self._runner, GraphRunner)

    def turn_graphs_on(self) -> None:
        """Replay calls from CUDA graphs from now on, where the session can have them."""
        if isinstance(self._runner, GraphRunner):
            self._runner.replays = True

    def turn_graphs_off(self, reason: str) -> None:
        """Give all CUDA graphs up, for good, and say why."""
        self._graph_sizes.clear()
        self._refusals = [reason]
        if isinstance(self._runner, GraphRunner):
            self._runner.drop_graphs()

    def capture(self, inputs: Sequence[Tensor]) -> None:
        """Capture the CUDA graph for the sizes of inputs.

        Raises:
            EngineClosedError: The engine was closed.
            GraphRefusedError: The run cannot be replayed.
            EngineRunError: ONNX Runtime failed.
        """
        runner = self._runner
        if runner is None:
            self.fail_closed("capture a CUDA graph")
        if isinstance(runner, GraphRunner):
            try:
                runner.capture(inputs)
            except GraphRefusedError as error:
                self._refusals.append(str(error))
                raise
            self._graph_sizes.append(self.graph.dim_sizes(inputs))

    def tables(self) -> Sequence[EngineTable]:
        """Return where nodes run, and on CUDA what is copied and which runs are replayed."""
        if self.device.type == "cpu":
            return (self._nodes,)
        return (self._nodes, copies_table(self.copies), self._graphs_table())

    def _graphs_table(self) -> EngineTable:
        rows: list[tuple[str, str]] = []
        if self.provider is not ONNXExecutionProvider.CUDA:
            rows.append(("none", f"the provider {self.provider.ort_name} runs without"))
        elif self.model.options["cuda_graphs"] is False:
            rows.append(("none", "cuda_graphs=False"))
        rows.extend(
            ("captured", ", ".join(f"{name}={size}" for name, size in sizes.items()) or "all calls")
            for sizes in self._graph_sizes
        )
        rows.extend(("refused", reason) for reason in dict.fromkeys(self._refusals))
        if not rows:
            rows.append(("none", "no recorded call can have one"))
        return EngineTable("CUDA graphs", ("state", "sizes or reason"), tuple(rows))

    def save(self, artifacts: ArtifactWriter) -> None:
        """Store the model's files and how it was built.

        Raises:
            EngineClosedError: The engine was closed, and its files may be gone.
        """
        if self._runner is None:
            self.fail_closed("save")
        path = self.model.path
        rewritten = self.model.rewritten if self.model.uses_rewritten else None
        names = [path.name, *self.model.facts.external_files]
        if rewritten is not None:
            names.append(rewritten.path.name)
        for name in names:
            artifacts.add_file(name, path.parent / name)
        artifacts.data.update(
            model=path.name,
            rewritten=None if rewritten is None else rewritten.path.name,
            channels_last=self.model.channels_last,
            exporter=self.model.exporter,
            opset=self.model.facts.opset,
            provider=self.provider.value,
            options=dict(self.model.options),
            graph_sizes=self.graph_sizes,
            copies=None if self.copies is None else [[*attrs.astuple(one)] for one in self.copies],
        )

    def release(self) -> None:
        """Let go of the session; it is freed when the last run under way is over."""
        self._runner = None


def open_engine(  # noqa: PLR0913 - all but two by keyword
    graph: GraphSpec,
    device: torch.device,
    *,
    model: ExportedModel,
    provider: ONNXExecutionProvider,
    cache_dir: Path | None,
    trial: SessionTrial | None = None,
    copies: Sequence[Copies] | None = None,
) -> ONNXRuntimeEngine:
    """Make a session for an exported model, check it, and wrap it.

    Args:
        graph: What the engine accepts and returns.
        device: Where it runs, with an index for CUDA.
        model: The exported model.
        provider: What executes it.
        cache_dir: Existing folder for TensorRT's engines; None caches nothing.
        trial: Creates and runs the session in another process first; None does without.
        copies: What an earlier session of the model was found to copy between devices.

    Raises:
        SessionTrialError: The session did not survive that.
        BuildError: The session cannot be created, or operators ran on the wrong provider.
        ProviderUnavailableError: ONNX Runtime left out the provider.
    """
    if provider.device_type == "cpu":
        facts = model.facts
        setup = session_setup(model.path, provider_list(provider, {}, {}))
        if trial is not None:
            trial.run(setup, facts)
        session = open_session(setup, facts)
        placement = check_placement(session, provider, facts)
        runner: Runner = CpuRunner(session, graph)
    else:
        path, facts = model.path, model.facts
        if model.uses_rewritten and model.rewritten is not None:
            path, facts = model.rewritten.path, model.rewritten.facts
        # Private: nobody else may queue work between a run and the events around it.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        cuda = cuda_options(
            graph,
            device,
            stream=stream.cuda_stream,
            # Without it, half-precision convolutions get kernels without tensor cores, too.
            tf32=matmul_tf32_allowed() or not model.facts.float32_products,
            nhwc=model.channels_last,
        )
        tensorrt = tensorrt_options(
            graph,
            device,
            stream=stream.cuda_stream,
            cache_dir=cache_dir,
            input_names=[value.name for value in model.facts.inputs],
        )
        setup = session_setup(path, provider_list(provider, cuda, tensorrt))
        if trial is not None:
            optimized = trial.run(setup, facts)
            copies = None if optimized is None else copies_in(optimized, facts)
        session = open_session(setup, facts)
        placement = check_placement(session, provider, facts)
        # What TensorRT queues may hold more than can be replayed, and cannot be tried here.
        wanted = model.options["cuda_graphs"] if provider is ONNXExecutionProvider.CUDA else False
        if wanted is False:
            runner = CudaRunner(session, graph, device=device, stream=stream)
        else:
            runner = GraphRunner(
                session, graph, device=device, stream=stream, always=wanted is True
            )
    return ONNXRuntimeEngine(
        graph,
        device,
        model=model,
        provider=provider,
        runner=runner,
        placement=placement,
        nodes=nodes_table(session, facts),
        copies=copies,
    )
