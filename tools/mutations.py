"""Mutants of a statement: the same source with one small thing wrong.

A marker (a comment such as `# [fedner eq 2]`) marks the statement on whose lines it
stands, or, where it has a line of its own between statements, the next one. Of a
compound statement (`for`, `if`) it marks the header alone. A definition or a docstring
computes nothing: nothing is marked.

What is changed, one at a time:

    sign        + and - exchanged; a leading minus, `not` or ~ taken away
    weight      a product without one factor, a quotient without its divisor, a power without
                its exponent; a name that is a call's second or later argument becomes 1
    operator    & and |, `and` and `or`, and the operators of `+=` and `-=` exchanged
    constant    a number plus one (so an index too); True and False exchanged; a slice without
                one of its bounds
    comparison  == and !=, < and <=, > and >=, `in` and `not in`, `is` and `is not` exchanged
    argument    a call without its last argument or a named one, a tuple without a `*part`
    function    one for another: mean and sum, min and max, argmin and argmax; or none: `x` in
                place of `f(x)` and `x.f()`
    choice      of `a if c else b` and of the header of `if` always one side; a comprehension
                without its condition
    statement   a call, a change in place or of an attribute left out
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from papers import parsed

EXCHANGED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
FUNCTIONS = {"mean": "sum", "sum": "mean", "min": "max", "max": "min"} | {
    "argmin": "argmax",
    "argmax": "argmin",
    "minimum": "maximum",
    "maximum": "minimum",
}
# Functions that only convert their argument: leaving one out is no mutant.
CONVERTED = frozenset(
    "float int bool str tuple list array asarray astype double cpu numpy from_numpy detach "
    "item tolist snapshot".split()
)
PRODUCTS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)


class Mutant(NamedTuple):
    """The source of a file with one small error.

    Attributes:
        line: The line of the error.
        source: The changed content of the file.
    """

    line: int
    source: str


def marked(source: str, line: int) -> ast.stmt | None:
    """Return the statement that a comment on a line marks; None if it computes nothing."""
    statements = [
        node for node in ast.walk(parsed(source)) if isinstance(node, ast.stmt)
    ]
    on = [s for s in statements if s.lineno <= line <= _last_line(s)]
    if not on:
        later = [s for s in statements if s.lineno > line]
        on = [min(later, key=lambda s: (s.lineno, s.col_offset))] if later else []
    if not on:
        return None
    innermost = max(on, key=lambda s: (s.lineno, s.col_offset))
    nothing = (
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Import,
        ast.ImportFrom,
    )
    text = isinstance(innermost, ast.Expr) and isinstance(innermost.value, ast.Constant)
    return None if text or isinstance(innermost, nothing) else innermost


def _last_line(statement: ast.stmt) -> int:
    """Return the last line of a statement, or of the header of a compound statement."""
    if not getattr(statement, "body", None):
        return statement.end_lineno or statement.lineno
    header = (getattr(statement, name, None) for name in ("test", "iter", "subject"))
    return max(
        statement.lineno, *(part.end_lineno for part in header if part is not None), 0
    )


def mutants(source: str, statement: ast.stmt) -> list[Mutant]:
    """Return all mutants of a statement, in the order of the text."""
    mutants_found: dict[Mutant, None] = {}
    for node, changed_node in _of_statement(statement):
        text = _replaced(
            source, node, ast.unparse(ast.fix_missing_locations(changed_node))
        )
        mutant = Mutant(node.lineno, text)
        if text != source and mutant not in mutants_found:
            ast.parse(text)
            mutants_found[mutant] = None
    return list(mutants_found)


def _of_statement(statement: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Yield a part of a statement, and its replacement, for each mutant."""
    match statement:
        case ast.Expr() | ast.AugAssign():
            yield statement, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield statement, ast.Pass()
        case ast.If():
            for value in (True, False):
                yield statement.test, ast.Constant(value)
    if isinstance(statement, ast.AugAssign) and type(statement.op) in EXCHANGED:
        yield statement, _with(statement, op=EXCHANGED[type(statement.op)]())
    if isinstance(statement, ast.If | ast.While):
        parts: list[ast.expr] = [statement.test]
    elif isinstance(statement, ast.For):
        parts = [statement.iter]
    elif isinstance(statement, ast.AnnAssign):
        parts = [statement.value] if statement.value else []
    else:
        parts = [
            node
            for node in ast.iter_child_nodes(statement)
            if isinstance(node, ast.expr)
        ]
    for part in parts:
        for node in _within(part):
            for changed_node in _of_expression(node):
                yield node, changed_node


def _within(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions in a node, first the node itself, but not those in f-strings."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.expr) and not isinstance(
        getattr(node, "ctx", None), ast.Store
    ):
        yield node
    if not (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)):
        for child in ast.iter_child_nodes(node):
            yield from _within(child)


def _of_expression(node: ast.expr) -> Iterator[ast.AST]:
    """Yield the replacements of an expression."""
    match node:
        case ast.BinOp(left_operand, op, right_operand):
            if type(op) in EXCHANGED:
                yield _with(node, op=EXCHANGED[type(op)]())
            elif isinstance(op, PRODUCTS):
                yield left_operand
                if isinstance(op, ast.Mult):
                    yield right_operand
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            yield ast.Constant(1 - value)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.BoolOp(op=op):
            yield _with(node, op=EXCHANGED[type(op)]())
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield _with(
                    node, ops=[*ops[:at], EXCHANGED[type(op)](), *ops[at + 1 :]]
                )
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for at, part in enumerate(node.generators):
                if part.ifs:
                    parts = [*node.generators]
                    parts[at] = _with(part, ifs=[])
                    yield _with(node, generators=parts)
        case ast.Call():
            yield from _of_call(node)
        case ast.Subscript(slice=ast.Slice() as cut):
            for name in ("lower", "upper", "step"):
                if getattr(cut, name) is not None:
                    yield _with(node, slice=_with(cut, **{name: None}))
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for at, part in enumerate(parts):
                if isinstance(part, ast.Starred):
                    yield _with(node, elts=[*parts[:at], *parts[at + 1 :]])


def _of_call(node: ast.Call) -> Iterator[ast.AST]:
    """Yield the replacements of a call."""
    match node:
        case ast.Call(
            func=ast.Attribute(attr=name) | ast.Name(id=name), args=[only], keywords=[]
        ):
            if name not in CONVERTED and name not in FUNCTIONS:
                yield only
        case ast.Call(func=ast.Attribute(attr=name, value=value), args=[], keywords=[]):
            if name not in CONVERTED and name not in FUNCTIONS:
                yield value
    match node.func:
        case ast.Attribute(attr=name) if name in FUNCTIONS:
            yield _with(node, func=_with(node.func, attr=FUNCTIONS[name]))
        case ast.Name(id=name) if name in FUNCTIONS:
            yield _with(node, func=_with(node.func, id=FUNCTIONS[name]))
    if node.args and len(node.args) + len(node.keywords) > 1:
        yield _with(node, args=node.args[:-1])
    for at, argument in enumerate(node.args):
        if at and isinstance(argument, ast.Name | ast.Attribute):
            yield _with(
                node, args=[*node.args[:at], ast.Constant(1), *node.args[at + 1 :]]
            )
    for at, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield _with(node, keywords=[*node.keywords[:at], *node.keywords[at + 1 :]])


def _with(node: Any, **changes: object) -> Any:
    """Return a copy of a node with other attributes."""
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _replaced(source: str, node: ast.expr | ast.stmt, replacement: str) -> str:
    """Return a source with another text in place of a node. Columns count bytes."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.encode("utf-8").splitlines(keepends=True)
    before = (
        b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    )
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(
        lines[node.end_lineno :]
    )
    text = (
        f"({replacement})"
        if isinstance(node, ast.expr) and _loose(replacement)
        else replacement
    )
    return (before + text.encode("utf-8") + after).decode("utf-8")


def _loose(text: str) -> bool:
    """Return whether an expression needs parentheses to stand beside an operator."""
    return (
        not isinstance(
            ast.parse(text, mode="eval").body,
            ast.Name
            | ast.Attribute
            | ast.Call
            | ast.Subscript
            | ast.List
            | ast.Dict
            | ast.ListComp,
        )
        and not text.isalnum()
    )
