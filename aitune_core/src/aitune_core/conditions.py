"""Conditions on the sizes of a graph's dims, such as ``"height % 32 == 0"``."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs

from aitune_core.errors import ConfigError

__all__ = ["FUNCTION_NAMES", "SizeCondition"]

#: Gives the value of an expression for the sizes of its dims.
_Compiled: TypeAlias = Callable[[Mapping[str, int]], Any]

_MAX_LENGTH: Final = 4096
_MAX_DEPTH: Final = 64
_MAX_EXPONENT: Final = 8

_OPERATORS: Final[Mapping[type, Callable[..., Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": abs,
    "ceil": math.ceil,
    "float": float,
    "floor": math.floor,
    "int": int,
    "max": max,
    "min": min,
    "round": round,
    "sqrt": math.sqrt,
    "trunc": math.trunc,
}

#: Names that mean something in a condition, so that no dim can have them.
FUNCTION_NAMES: Final = frozenset(_FUNCTIONS)


@attrs.frozen
class SizeCondition:
    """A condition on the sizes of a graph's dims.

    Args:
        text: An expression over dim names in Python's syntax: numbers, ``+ - * / // % **``,
            comparisons, ``and``, ``or``, ``not``, ``x if c else y``, and the functions ``abs``,
            ``ceil``, ``float``, ``floor``, ``int``, ``max``, ``min``, ``round``, ``sqrt`` and
            ``trunc``. It is never handed to Python's ``eval``.

    Raises:
        ConfigError: The text is no such expression.
    """

    text: str = attrs.field(validator=lambda _, __, text: _check_text(text))

    @functools.cached_property
    def _node(self) -> ast.expr:
        return _parsed(self.text)

    @functools.cached_property
    def _evaluate(self) -> _Compiled:
        return _compiled(self._node)

    @functools.cached_property
    def dims(self) -> frozenset[str]:
        """Names of the dims that it speaks of."""
        functions = {id(part.func) for part in ast.walk(self._node) if isinstance(part, ast.Call)}
        return frozenset(
            part.id
            for part in ast.walk(self._node)
            if isinstance(part, ast.Name) and id(part) not in functions
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Whole numbers that occur in it, in order."""
        nodes = ast.walk(self._node)
        return tuple(
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and type(node.value) is int
        )

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether sizes meet it. ``sizes`` has at least its dims; others do not matter.

        An expression that has no value at these sizes, such as a division by zero, is not met.
        """
        try:
            return bool(self._evaluate(sizes))
        except (ArithmeticError, TypeError, ValueError):
            return False

    @functools.cached_property
    def defined(self) -> str | None:
        """Name of the dim that it defines by others; None where it is no definition.

        A definition reads ``name == expression``, and the expression does not use the name.
        """
        match self._node:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[value]):
                used = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
                return None if name in used else name
        return None

    def defined_size(self, sizes: Mapping[str, int]) -> int:
        """Return the size that a definition gives to its dim.

        Raises:
            ValueError: It is no definition, or gives no size, such as by a division by zero.
        """
        if self.defined is None or not isinstance(self._node, ast.Compare):
            msg = f"'{self}' defines no dim"
            raise ValueError(msg)
        try:
            return int(_compiled(self._node.comparators[0])(sizes))
        except ArithmeticError as error:
            msg = f"'{self}' gives no size for {dict(sizes)}"
            raise ValueError(msg) from error

    def __str__(self) -> str:
        """Return the text."""
        return self.text


def _check_text(text: object) -> None:
    try:
        if not isinstance(text, str) or len(text) > _MAX_LENGTH:
            msg = "it must be a string of limited length"
            raise ValueError(msg)  # noqa: TRY301 - one kind of error for the caller
        _check_node(_parsed(text), 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        msg = (
            f"not a condition on sizes: {error}; write an expression over dim names, such as "
            f"'height % 32 == 0', got {text!r:.200}"
        )
        raise ConfigError(msg, field="text", value=text, allowed="an expression") from error


def _check_node(node: ast.AST, depth: int) -> None:
    children = _operands(node)
    if children is None:
        msg = f"{ast.unparse(node)!r:.80} is not allowed in it"
        raise ValueError(msg)
    if depth > _MAX_DEPTH:
        msg = "it is nested too deeply"
        raise ValueError(msg)
    for child in children:
        _check_node(child, depth + 1)


def _operands(node: ast.AST) -> list[ast.expr] | None:  # noqa: PLR0911 - one per form
    """Return the parts of a node whose form is allowed, None where it is not."""
    match node:
        case ast.Name() | ast.Constant(value=bool() | int() | float()):
            return []
        case ast.BinOp(left=left, right=ast.Constant(value=int() | float() as power), op=ast.Pow()):
            return [left] if 0 <= power <= _MAX_EXPONENT else None
        case ast.BinOp(left=left, right=right, op=op) if type(op) in _OPERATORS:
            return [left, right]
        case ast.UnaryOp(operand=operand, op=op) if type(op) in _OPERATORS:
            return [operand]
        case ast.BoolOp(values=values):
            return values
        case ast.Compare(left=left, ops=ops, comparators=others) if {*map(type, ops)} <= set(
            _OPERATORS
        ):
            return [left, *others]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return [test, body, orelse]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            # Of one number there is no largest.
            return args if (len(args) > 1 if name in {"max", "min"} else len(args) == 1) else None
    return None


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _compiled(node: ast.AST) -> _Compiled:  # noqa: PLR0911 - one per form
    """Return a function of sizes that gives an expression's value."""
    match node:
        case ast.Name(id=name):
            return operator.itemgetter(name)
        case ast.Constant(value=value):
            return lambda _: value
        case ast.BinOp(left=left, right=ast.Constant(value=power), op=ast.Pow()):
            base = _compiled(left)
            return lambda sizes: base(sizes) ** power
        case ast.BinOp(left=left, right=right, op=op):
            binary, one, other = _OPERATORS[type(op)], _compiled(left), _compiled(right)
            return lambda sizes: binary(one(sizes), other(sizes))
        case ast.UnaryOp(op=op, operand=operand):
            unary, inner = _OPERATORS[type(op)], _compiled(operand)
            return lambda sizes: unary(inner(sizes))
        case ast.BoolOp(op=op, values=values):
            together, parts = all if isinstance(op, ast.And) else any, [*map(_compiled, values)]
            return lambda sizes: together(part(sizes) for part in parts)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            test_of, body_of, else_of = _compiled(test), _compiled(body), _compiled(orelse)
            return lambda sizes: (body_of if test_of(sizes) else else_of)(sizes)
        case ast.Call(func=ast.Name(id=name), args=args):
            function, inputs = _FUNCTIONS[name], [*map(_compiled, args)]
            return lambda sizes: function(*(part(sizes) for part in inputs))
        case ast.Compare(left=left, ops=ops, comparators=others):
            chain = [_compiled(part) for part in (left, *others)]
            links = [_OPERATORS[type(op)] for op in ops]
            return lambda sizes: _chain_holds(links, [part(sizes) for part in chain])
    raise AssertionError(node)  # _check_node lets nothing else pass


def _chain_holds(links: Sequence[Callable[..., Any]], values: Sequence[Any]) -> bool:
    return all(
        link(one, other) for link, one, other in zip(links, values, values[1:], strict=False)
    )
