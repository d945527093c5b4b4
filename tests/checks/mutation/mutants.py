"""Mutants: small changes to the code of functions. Each should make a test fail.

Code outside functions runs at import, for all tests alike, and is left as it is; so are annotations, defaults and
decorators, and the messages of exceptions and warnings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
#: The calls whose arguments are messages.
MESSAGES = re.compile(r"(Error|Exception|Warning|warn|warn_user)$")
#: The fields of a node that run at import, or never.
LEFT_ALONE = {"annotation", "returns", "args", "decorator_list", "type_params"}


class Mutant(NamedTuple):
    """A change of the source between two places, whose lines count from 1 and whose columns are bytes from 0."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    original: str
    replacement: str
    #: The first line of the statement, since an expression may begin on a line that no bytecode belongs to.
    statement_line: int

    def __str__(self) -> str:
        original, replacement = (" ".join(text.split()) for text in (self.original, self.replacement))
        return f"{self.path}:{self.line}:{self.column}: {self.kind}: {original} -> {replacement}"

    def apply(self, source: bytes) -> bytes:
        """Return the source with this change."""
        lines = source.splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        after = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return before + self.replacement.encode() + after


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of their places."""
    found: list[Mutant] = []
    for node, statement in function_nodes(ast.parse(source)):
        for kind, place, replacement in changes(node):
            text = ast.unparse(replacement)
            if isinstance(replacement, ast.expr) and not isinstance(replacement, ast.Constant):
                text = f"({text})"
            original = ast.get_source_segment(source, place) or ""
            ends = (place.end_lineno or place.lineno, place.end_col_offset or 0)
            found.append(Mutant(path, place.lineno, place.col_offset, *ends, kind, original, text, statement.lineno))
    return sorted(set(found))


def function_nodes(
    node: ast.AST, statement: ast.stmt | None = None, within: bool = False
) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """Yield each node in the body of a function that may change, and the statement that it belongs to."""
    if isinstance(node, ast.JoinedStr):  # the places in it are wrong before Python 3.12
        return
    statement = node if isinstance(node, ast.stmt) else statement
    if within and statement is not None:
        yield node, statement
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and MESSAGES.search(ast.unparse(node.func))):
        return
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name, value in ast.iter_fields(node):
        if name in LEFT_ALONE and not (name == "args" and isinstance(node, ast.Call)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from function_nodes(child, statement, within or (is_function and name == "body"))


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Yield the kind of each change of a node, the part that changes, and what replaces it."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            yield from forced(test, [True, False])
        case ast.While(test=test):  # forced to be true, most loops would only run into the timeout
            yield from forced(test, [False])
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield from forced(test, [True, False])
    match node:
        case ast.Compare(left=left, ops=[operator, *others], comparators=values):
            yield "comparison", node, ast.Compare(left, [COMPARISONS[type(operator)](), *others], values)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right) if not (is_text(left) or is_text(right)):
            yield "arithmetic", node, ast.BinOp(left, swapped(node.op), right)
        case ast.AugAssign(target=target, op=operator, value=value):
            if isinstance(operator, ast.Add | ast.Sub) and not is_text(value):
                yield "arithmetic", node, ast.AugAssign(target, swapped(operator), value)
            yield "removed", node, ast.Pass()
        case ast.BoolOp(op=operator, values=values):
            yield "and/or", node, ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", node, operand
        case ast.Constant(value=bool() as value):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", node, ast.Return(ast.Constant(None))
        case ast.Break():
            yield "loop", node, ast.Continue()
        case ast.Continue():
            yield "loop", node, ast.Break()
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield "removed", node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "removed", node, ast.Pass()


def forced(test: ast.expr, values: list[bool]) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Yield the changes that replace a condition by a constant."""
    if not isinstance(test, ast.Constant):
        for value in values:
            yield "condition", test, ast.Constant(value)


def swapped(operator: ast.operator) -> ast.operator:
    """Return `-` for `+`, and `+` for `-`."""
    return ast.Sub() if isinstance(operator, ast.Add) else ast.Add()


def is_text(node: ast.expr) -> bool:
    """Return whether an operand is text or a list, which nothing is subtracted from."""
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )
