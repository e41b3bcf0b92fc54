"""Which tests hold for a model's code: the program that `tasks.code` runs in the sandbox.

Invariant: what the code returns counts by its value alone. An object that says it equals everything (its own
`__eq__`, or `unittest.mock.ANY`) equals nothing; what the code does to `builtins`, `json`, `sys.stdout` or
`print` changes no verdict. Only code that goes through the interpreter's frames in search of its judge could
forge one.

Run by its text, in a namespace with a copy of the builtins and in no module that the code could import, so it
imports nothing of this repository.
"""

import ast
import builtins
import operator
from collections.abc import Callable
from fractions import Fraction
from os import write
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

PASSED, FAILED = "1", "0"
_SEQUENCES: tuple[Any, ...] = (list, tuple)
_HOLDS = "__holds__"  # the name under which rewritten tests call `holds`


def run(code: str, tests: list[str], nonce: str) -> None:
    """Write the line of the verdict: the nonce and a digit for each test. What `code` raises is raised."""
    write(1, f"\n{nonce}{verdict(code, tests)}\n".encode())


def verdict(code: str, tests: list[str]) -> str:
    checks = [_rewritten(test) for test in tests]  # before the code can change how they are read
    pristine = dict(vars(builtins))
    space: dict[str, Any] = {"__name__": "solution"}
    exec(compile(code, "solution.py", "exec"), space)
    scope = {**space, "__builtins__": pristine, _HOLDS: holds}
    digits = ""
    for check in checks:
        try:
            exec(check, scope)
            digits += PASSED
        except Exception:  # noqa: BLE001 - whatever it is, the test does not hold
            digits += FAILED
    return digits


def _rewritten(test: str) -> Any:
    """The test with its comparisons made by `holds`. What is no Python says so when it runs."""
    try:
        tree = _Comparisons().visit(ast.parse(test, "test.py"))
        return compile(ast.fix_missing_locations(tree), "test.py", "exec")
    except (SyntaxError, ValueError, RecursionError):
        return test


class _Comparisons(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        operators: list[ast.expr] = [ast.Constant(type(each).__name__) for each in node.ops]
        arguments = [ast.List(operators, ast.Load()), node.left, *node.comparators]
        return ast.copy_location(ast.Call(ast.Name(_HOLDS, ast.Load()), arguments, []), node)


def holds(operators: list[str], *values: Any) -> Any:
    """`a < b == c`, the operators by the names of their classes in `ast`."""
    result: Any = True
    for name, left, right in zip(operators, values, values[1:], strict=False):
        result = _OPERATORS[name](left, right)
        if len(operators) > 1 and not result:
            return False
    return result


def _same(a: Any, b: Any) -> Any:
    for kind in _SEQUENCES:
        if isinstance(a, kind) and isinstance(b, kind):
            ours, theirs = [*kind.__iter__(a)], [*kind.__iter__(b)]
            return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(a, dict) and isinstance(b, dict):
        return dict.__len__(a) == dict.__len__(b) and all(
            dict.__contains__(a, key) and _same(dict.__getitem__(a, key), dict.__getitem__(b, key))
            for key in dict.__iter__(b)
        )
    return _by(operator.eq, "__eq__")(a, b)


def _by(compare: Callable[[Any, Any], Any], method: str) -> Callable[[Any, Any], Any]:
    """`compare`, where no side brings a comparison of its own, or both are of the one class that does."""

    def compared(a: Any, b: Any) -> Any:
        own = type(a) is type(b) or not (_is_own(a, method) or _is_own(b, method))
        return compare(a, b) if own else False

    return compared


def _is_own(value: Any, method: str) -> bool:
    """Does the value's class bring it, rather than a builtin type, whose methods are written in C?"""
    try:
        found = type.__getattribute__(type(value), method)
    except AttributeError:
        return False
    in_c = isinstance(found, WrapperDescriptorType | MethodDescriptorType) and found.__name__ == method
    return not in_c and type(value) is not Fraction


def _among(value: Any, box: Any) -> Any:
    for kind in _SEQUENCES:
        if isinstance(box, kind):
            return any(_same(value, each) for each in kind.__iter__(box))
    if _is_own(value, "__eq__") or _is_own(box, "__contains__"):
        return False
    return value in box


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": _same,
    "NotEq": lambda a, b: not _same(a, b),
    "Lt": _by(operator.lt, "__lt__"),
    "LtE": _by(operator.le, "__le__"),
    "Gt": _by(operator.gt, "__gt__"),
    "GtE": _by(operator.ge, "__ge__"),
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": _among,
    "NotIn": lambda a, b: not _among(a, b),
}
