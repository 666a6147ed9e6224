"""What a report shows of an engine: where its nodes run, and what is copied between devices."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from aitune_backend_onnxruntime.parts import THE_MODULE, UNKNOWN
from aitune_core.backend import EngineTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import onnx

    from aitune_backend_onnxruntime.model_file import ModelFacts

__all__ = ["Copies", "copies_in", "copies_table", "nodes_table"]

Direction = Literal["to the GPU", "to the CPU"]
_DIRECTIONS: Final[Mapping[str, Direction]] = {
    "MemcpyFromHost": "to the GPU",
    "MemcpyToHost": "to the CPU",
}
#: How many parts are named per operator.
_NAMED: Final = 3
#: Over how many nodes the part of a copied value is looked for.
_FURTHEST: Final = 8


@attrs.frozen
class Copies:
    """Copies between devices in every run.

    Attributes:
        direction: ``"to the GPU"`` or ``"to the CPU"``.
        part: Part of the module that computes what is copied; as it is shown.
        count: How many there are.
    """

    direction: str
    part: str
    count: int


def nodes_table(session: Any, facts: ModelFacts) -> EngineTable:  # noqa: ANN401
    """Return how many nodes of which operator a session runs on which provider, and their parts.

    Args:
        session: The session, made with the option to note this.
        facts: Facts of its model.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    parts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for assigned in session.get_provider_graph_assignment_info():
        for node in assigned.get_nodes():
            counts[assigned.ep_name][node.op_type] += 1
            parts[assigned.ep_name, node.op_type][_shown(facts.parts.get(node.name))] += 1
    rows: list[tuple[str | int | float, ...]] = []
    for provider, operators in counts.items():
        rows.append((provider, "all", operators.total(), ""))
        rows.extend(
            (provider, operator, count, _listed(parts[provider, operator]))
            for operator, count in operators.most_common()
        )
    return EngineTable(
        "nodes per provider, before ONNX Runtime fuses them",
        ("provider", "operator", "nodes", "parts of the module"),
        tuple(rows),
    )


def _shown(part: str | None) -> str:
    return UNKNOWN if part is None else part or THE_MODULE


def _listed(parts: Counter[str]) -> str:
    named = ", ".join(part for part, _ in parts.most_common(_NAMED))
    return named + (f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else "")


def copies_table(copies: Sequence[Copies] | None) -> EngineTable:
    """Return the table of copies; None where they are not known."""
    rows: tuple[tuple[str | int | float, ...], ...]
    if copies is None:
        rows = ((UNKNOWN, "the session was not looked into when it was built", ""),)
    else:
        rows = tuple((one.direction, one.part, one.count) for one in copies) or (("none", "", 0),)
    return EngineTable(
        "copies between devices in every run", ("direction", "part of the module", "copies"), rows
    )


def copies_in(optimized: onnx.ModelProto, facts: ModelFacts) -> tuple[Copies, ...]:
    """Return the copies in the graph that a session runs.

    Args:
        optimized: That graph, as ONNX Runtime wrote it.
        facts: Facts of the model that the session was made of.
    """
    found = Counter(_copies(optimized.graph, facts.parts))
    return tuple(Copies(*which, count) for which, count in found.most_common())


def _copies(graph: onnx.GraphProto, parts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    makers = {name: node for node in graph.node for name in node.output}
    users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            users[name].append(node)
    for node in graph.node:
        direction = _DIRECTIONS.get(node.op_type)
        if direction is not None:
            part = _part(node, makers, users, parts)
            yield direction, _shown(part)
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + [*attribute.graphs]:
                yield from _copies(inner, parts)


def _part(
    copy: onnx.NodeProto,
    makers: Mapping[str, onnx.NodeProto],
    users: Mapping[str, Sequence[onnx.NodeProto]],
    parts: Mapping[str, str],
) -> str | None:
    """Return the part of what makes a copied value, else of what uses it.

    Nodes that ONNX Runtime fused or made have other names; those before and after them are asked.
    """
    names = [*copy.input]
    for _ in range(_FURTHEST):
        known = next((parts[name] for name in names if name in parts), None)
        if known is not None:
            return known
        made = [makers[name] for name in names if name in makers]
        names = list(dict.fromkeys(name for node in made for name in (node.name, *node.input)))
    names = [*copy.output]
    for _ in range(_FURTHEST):
        known = next((parts[name] for name in names if name in parts), None)
        if known is not None:
            return known
        used = [node for name in names for node in users.get(name, ())]
        names = list(dict.fromkeys(name for node in used for name in (node.name, *node.output)))
    return None
