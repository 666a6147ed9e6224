"""Calls: arguments bound to the parameters of ``forward``, however they were written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, TypeAlias

import attrs

from aitune_core._tree_json import structure_from_json, structure_to_json
from aitune_core._trees import (
    Omitted,
    Structure,
    TreeError,
    flatten,
    hole_paths,
    leaf_paths,
    unflatten,
)
from aitune_core.errors import CallFormError

__all__ = ["CallForm", "Parameter", "Writing"]

#: How a call is written: as short as can be; with defaults, by keyword or by position.
Writing: TypeAlias = Literal["short", "keywords", "positions"]

_KINDS: Final = {kind.name: kind for kind in inspect._ParameterKind}  # noqa: SLF001
_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


@attrs.frozen
class Parameter:
    """A parameter of ``forward``.

    Attributes:
        name: Its name.
        kind: How arguments reach it.
        default: Its default value; `Omitted.OMITTED` where that is no plain value; unset for a
            required parameter.
    """

    name: str
    kind: inspect._ParameterKind
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is inspect.Parameter.empty and self.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )


def _plain_default(default: object) -> object:
    if default is inspect.Parameter.empty:
        return default
    leaves: list[Any] = []
    try:
        flatten(default, leaves)
    except TreeError:
        return Omitted.OMITTED
    return Omitted.OMITTED if leaves else default


class CallForm:
    """The signature of a module's ``forward``, ready to bind calls quickly."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self._default_structures = tuple(
            None if parameter.default is inspect.Parameter.empty else flatten(parameter.default, [])
            for parameter in self.parameters
        )
        self._positional = tuple(
            position
            for position, parameter in enumerate(self.parameters)
            if parameter.kind in _POSITIONAL
        )
        self._keywords = {
            parameter.name: position
            for position, parameter in enumerate(self.parameters)
            if parameter.kind
            in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        }
        self._var_positional = self._position_of(inspect.Parameter.VAR_POSITIONAL)
        self._var_keyword = self._position_of(inspect.Parameter.VAR_KEYWORD)
        self._blank = tuple(self._blank_value(parameter) for parameter in self.parameters)
        self._required = tuple(
            position for position, parameter in enumerate(self.parameters) if parameter.required
        )

    @classmethod
    def of(cls, forward: Callable[..., object]) -> CallForm:
        """Return the call form of a ``forward`` method; ``(*args, **kwargs)`` where it has none."""
        try:
            signature = inspect.signature(forward)
        except (TypeError, ValueError):
            signature = inspect.signature(lambda *args, **kwargs: (args, kwargs))
        return cls(
            [
                Parameter(parameter.name, parameter.kind, _plain_default(parameter.default))
                for parameter in signature.parameters.values()
            ]
        )

    def _position_of(self, kind: inspect._ParameterKind) -> int | None:
        for position, parameter in enumerate(self.parameters):
            if parameter.kind is kind:
                return position
        return None

    @staticmethod
    def _blank_value(parameter: Parameter) -> object:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return ()
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return {}
        return parameter.default

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return one value per parameter, with defaults filled in.

        Raises:
            CallFormError: An argument is missing, unknown, or given twice.
        """
        values: list[Any] = list(self._blank)
        for position, value in zip(self._positional, args):  # noqa: B905 - lengths may differ
            values[position] = value
        if len(args) > len(self._positional):
            if self._var_positional is None:
                self._fail(f"takes {len(self._positional)} positional arguments, got {len(args)}")
            values[self._var_positional] = args[len(self._positional) :]
        if kwargs:
            self._bind_keywords(kwargs, values, len(args))
        for position in self._required:
            if values[position] is inspect.Parameter.empty:
                name = self.parameters[position].name
                self._fail(f"is missing the required argument {name!r}", name)
        return values

    def _bind_keywords(self, kwargs: Mapping[str, Any], values: list[Any], given: int) -> None:
        extra: dict[str, Any] = {}
        for name, value in kwargs.items():
            target = self._keywords.get(name)
            if target is None:
                extra[name] = value
                continue
            if target < given and target in self._positional:
                self._fail(f"got argument {name!r} by position and by keyword", name)
            values[target] = value
        if extra:
            if self._var_keyword is None:
                name = next(iter(extra))
                self._fail(f"got an unexpected keyword argument {name!r}", name)
            values[self._var_keyword] = extra

    def _fail(self, reason: str, path: str | None = None) -> NoReturn:
        msg = f"the call {reason}; forward takes {self}"
        raise CallFormError(msg, path=path, expected=str(self), got=reason)

    def structure(self, values: Sequence[Any], leaves: list[Any]) -> tuple[Structure, ...]:
        """Append the tensors of bound ``values`` to ``leaves`` and return the call's structure.

        Raises:
            TreeError: A value cannot be part of a graph.
        """
        return tuple(
            flatten(value, leaves, parameter.name)
            for parameter, value in zip(self.parameters, values, strict=True)
        )

    def written(
        self, structure: Sequence[Structure], given: int, names: Sequence[str]
    ) -> list[tuple[int | str, Structure]]:
        """Return place and structure of each argument of a call as it was written, in flat order.

        Args:
            structure: The call.
            given: Number of arguments by position.
            names: Keywords, in order.
        """
        places: list[tuple[int | str, Structure]] = []
        by_position = {place: index for index, place in enumerate(self._positional[:given])}
        for position, child in enumerate(structure):
            name = self.parameters[position].name
            if position in by_position:
                places.append((by_position[position], child))
            elif position == self._var_positional:
                start = len(self._positional)
                places += [(start + index, part) for index, part in enumerate(child[-1])]
            elif position == self._var_keyword:
                extra = [key for _, key in child[1]]
                places += list(zip(extra, child[-1], strict=True))
            elif name in names:
                places.append((name, child))
        return places

    def values(self, structure: Sequence[Structure], leaves: Sequence[Any]) -> list[Any]:
        """Return bound values for a call structure and its tensors."""
        remaining = iter(leaves)
        return [unflatten(child, remaining) for child in structure]

    def constants(self, structure: Sequence[Structure]) -> Iterator[str]:
        """Yield path and value of what a call gives that is no tensor, apart from defaults."""
        for parameter, child in zip(self.parameters, structure, strict=True):
            default = parameter.default
            if default is not inspect.Parameter.empty and child == flatten(default, []):
                continue
            for path, leaf in leaf_paths(child, parameter.name):
                if not hole_paths(leaf):
                    yield f"{path} = {unflatten(leaf, iter(()))!r}"

    def leaf_paths(self, structure: Sequence[Structure]) -> list[str]:
        """Return the path of every tensor of a call structure, in order."""
        return [
            path
            for parameter, child in zip(self.parameters, structure, strict=True)
            for path in hole_paths(child, parameter.name)
        ]

    def arguments(
        self,
        structure: Sequence[Structure],
        leaves: Sequence[Any],
        writing: Writing = "short",
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` that call ``forward`` for a call structure and its tensors.

        Args:
            structure: The call.
            leaves: Its tensors.
            writing: ``"short"`` leaves arguments that equal their default out, and uses keywords
                wherever they can be, since decorators of ``forward`` often look into ``kwargs``;
                ``"keywords"`` and ``"positions"`` give defaults that can be given.
        """
        values = self.values(structure, leaves)
        by_position = writing == "positions" or (
            self._var_positional is not None and bool(values[self._var_positional])
        )
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        needed = 0  # trailing positional arguments that equal their defaults are left out
        for position, (parameter, value) in enumerate(zip(self.parameters, values, strict=True)):
            given = structure[position] != self._default_structures[position] or (
                writing != "short" and value is not Omitted.OMITTED
            )
            by_position = by_position and value is not Omitted.OMITTED
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args.extend(value)
                needed = len(args) if value else needed
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(value)
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
                by_position and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            ):
                args.append(value)
                needed = len(args) if given else needed
            elif given:
                kwargs[parameter.name] = value
        return tuple(args[:needed]), kwargs

    def to_json(self) -> list[dict[str, Any]]:
        """Return the parameters as JSON-able data.

        Raises:
            TreeError: A default cannot be stored; it is then stored as omitted.
        """
        return [self._parameter_to_json(parameter) for parameter in self.parameters]

    @staticmethod
    def _parameter_to_json(parameter: Parameter) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind.name}
        if parameter.default is Omitted.OMITTED:
            entry["default"] = Omitted.OMITTED.value
        elif parameter.default is not inspect.Parameter.empty:
            entry["default"] = structure_to_json(flatten(parameter.default, []), parameter.name)
        return entry

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> CallForm:
        """Return the call form that `to_json` made ``data`` from.

        Raises:
            TreeError: A default is malformed or names an unregistered type.
            KeyError: A field is missing or a kind is unknown.
        """
        parameters = []
        for entry in data:
            default: Any = inspect.Parameter.empty
            if entry.get("default") == Omitted.OMITTED.value:
                default = Omitted.OMITTED
            elif "default" in entry:
                default = unflatten(structure_from_json(entry["default"]), iter(()))
            parameters.append(Parameter(str(entry["name"]), _KINDS[entry["kind"]], default))
        return cls(parameters)

    def __str__(self) -> str:
        """Return the parameters as Python writes them."""
        prefix: dict[inspect._ParameterKind, str] = {
            inspect.Parameter.VAR_POSITIONAL: "*",
            inspect.Parameter.VAR_KEYWORD: "**",
        }
        return "({})".format(
            ", ".join(
                prefix.get(parameter.kind, "")
                + parameter.name
                + ("" if parameter.required or parameter.kind in prefix else "=...")
                for parameter in self.parameters
            )
        )
