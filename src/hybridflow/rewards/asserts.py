"""Assert statements as test cases: the text of the tests in, a program out.

assert f(2) == 4                    the value of f(2) comes out as data and is compared here
assert abs(f(2) - 1.41) < 0.01      the tests run in a separate process (`apart/tests.py`)
"""

from __future__ import annotations

import ast
import builtins
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.apart.programs import Program, program_of_calls, program_of_tests

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot", "dt": "datetime"}
_WELL_KNOWN = {
    **dict.fromkeys(("Counter", "OrderedDict", "ChainMap", "defaultdict", "deque"), "collections"),
    **dict.fromkeys(("datetime", "timedelta"), "datetime"),
    "Decimal": "decimal",
    "Fraction": "fractions",
    "isclose": "math",
}
"""Names that tests use without importing them, as the solution will have; they are not the solution's, but
where the tests use no other name of it.
"""
_SOLUTION = "solution"
"""The module that tests in a separate file import the solution's names from."""
_MAINS = ("unittest.main(", "pytest.main(")
"""What runs the tests of a file, at its end."""
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def program_of_asserts(solution: str, asserts: Sequence[Any], max_cases: int) -> Program:
    """Return a program that tries a solution on the first cases. Raises RewardError where there is none."""
    try:
        parsed = ast.parse("\n".join(str(each) for each in asserts)).body
    except SyntaxError as error:
        raise RewardError(f"the assert statements of the ground truth cannot be read: {error}") from error
    statements = _of_a_script(parsed)
    checking = {each.name for each in statements if isinstance(each, ast.FunctionDef) and _asserts(each.body)}
    is_case = [_is_case(each, checking) for each in statements]
    for call, case in list(_calls_of_tests(statements, checking)):
        statements += ast.parse(call).body
        is_case.append(case)
    places = [place for place, case in enumerate(is_case) if case][:max_cases]
    if not places:
        raise RewardError(
            "the ground truth has no assert statement, and no inputs and outputs (tests with arguments or "
            "decorators are not run)"
        )
    statements = statements[: places[-1] + 1]
    names = _Names(statements)
    imports = [ast.unparse(each) for each in statements if isinstance(each, (ast.Import, ast.ImportFrom))]
    cases = [statements[place] for place in places]
    if len(cases) + len(imports) == len(statements):
        checks = [names.check_of(each) for each in cases]
        if None not in checks:
            calls, functions = zip(*filter(None, checks), strict=True)
            return program_of_calls(solution, calls, functions, imports=imports)
    request = {
        "imports": imports,
        "modules": names.modules(),
        "steps": [_step(each, case=case) for each, case in zip(statements, is_case)],
        "names": names.known,
        "of_solution": names.not_built_in,
        "classes": {each.name: ast.unparse(each) for each in statements if isinstance(each, ast.ClassDef)},
    }
    return program_of_tests(solution, len(cases), request)


def _of_a_script(parsed: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a file that is run, where the solution's names are known."""
    statements: list[ast.stmt] = []
    for each in parsed:
        if isinstance(each, ast.If) and ast.unparse(each.test) == "__name__ == '__main__'":
            statements += _of_a_script(each.body)
        elif isinstance(each, ast.ImportFrom) and each.module == _SOLUTION and not each.level:
            renamed = [alias for alias in each.names if alias.asname]
            statements += ast.parse("\n".join(f"{alias.asname} = {alias.name}" for alias in renamed)).body
        elif not (isinstance(each, ast.Expr) and any(main in ast.unparse(each) for main in _MAINS)):
            statements.append(each)
    return statements


def _calls_of_tests(statements: Sequence[ast.stmt], checking: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield the calls of tests that pytest or unittest would find, and whether each is a case."""
    used = {node.id for node in _nodes(statements) if isinstance(node, ast.Name)}
    for each in statements:
        if isinstance(each, ast.FunctionDef) and each.name not in used:
            if _is_test(each, []) and any(_is_case(inner, checking) for inner in each.body):
                yield f"{each.name}()", True
        elif isinstance(each, ast.ClassDef) and not each.decorator_list:
            of_unittest = any("TestCase" in ast.unparse(base) for base in each.bases)
            if not of_unittest and (each.bases or not each.name.startswith("Test")):
                continue
            if of_unittest:
                yield f"{each.name}.setUpClass()", False
            for method in each.body:
                if isinstance(method, ast.FunctionDef) and _is_test(method, ["self"]):
                    call = f"('{method.name}').debug()" if of_unittest else f"().{method.name}()"
                    yield f"{each.name}{call}", True


def _is_test(function: ast.FunctionDef, arguments: list[str]) -> bool:
    """Return whether a function is a test that can be called with these arguments alone."""
    names = [each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)]
    return function.name.startswith("test") and names == arguments and not function.decorator_list


def _step(statement: ast.stmt, *, case: bool) -> dict[str, Any]:
    """Return a statement as `apart/tests.py` runs it; a block must come to one of its asserts.

    Those in `try` apart: there, one may say that an exception has not been raised.
    """
    counted = _Counted()
    if case and isinstance(statement, _BLOCKS):
        counted.visit(statement)
    code = ast.unparse(ast.fix_missing_locations(statement))
    return {"code": code, "case": case, "asserts": counted.found}


class _Counted(ast.NodeTransformer):
    """Puts a call of `__asserts__` before each assert."""

    found = False

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        self.found = True
        return [ast.Expr(ast.Call(ast.Name("__asserts__", ast.Load()), [], [])), node]

    def visit_Try(self, node: ast.Try) -> ast.Try:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node


def _asserts(statements: Sequence[ast.AST]) -> bool:
    """Return whether an assert is among statements, definitions within them apart."""
    return any(
        isinstance(each, ast.Assert)
        or (not isinstance(each, _DEFINITIONS) and _asserts(list(ast.iter_child_nodes(each))))
        for each in statements
    )


def _is_case(statement: ast.stmt, checking: set[str]) -> bool:
    """Return whether a statement is a case: an assert, a block that has one or wants an exception, or a call
    of a function that has one.
    """
    if isinstance(statement, ast.Assert):
        return True
    if isinstance(statement, ast.With):
        texts = [ast.unparse(item.context_expr) for item in statement.items]
        if any("raises(" in text or "assertRaises" in text for text in texts):
            return True
    if isinstance(statement, _BLOCKS):
        return _asserts([statement])
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in checking


def _nodes(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


class _Names:
    """The names in the tests, by whose they are: the tests' own, those of Python, or the solution's."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self.statements = statements
        used: dict[str, None] = {}
        bases: dict[str, None] = {}
        self.own: set[str] = set()
        for node in _nodes(statements):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    used[node.id] = None
                else:
                    self.own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                bases[node.value.id] = None
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.own.add(node.name)
            elif isinstance(node, ast.arg):
                self.own.add(node.arg)
            elif isinstance(node, ast.alias):
                self.own.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self.own.add(node.name)
        free = [name for name in used if name not in self.own and not hasattr(builtins, name)]
        self.known = {
            name: [_ALIASES.get(name, name)] for name in free if name in bases and not name[0].isupper()
        }
        """Module, and name in it, of what tests use but do not import; a module may turn out not to exist."""
        well_known = {name: [_WELL_KNOWN[name], name] for name in free if name in _WELL_KNOWN}
        self.not_built_in: list[str] = []
        """Built-in names that are the solution's here, since the tests use no other name of it."""
        if set(free) - set(self.known) - set(well_known):
            self.known |= well_known
        elif not well_known:
            self.not_built_in = self._innermost()

    def _innermost(self) -> list[str]:
        """Return the function of the first call that has no call among its arguments."""
        for node in _nodes([each for each in self.statements if isinstance(each, ast.Assert)]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                inner = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                if len(inner) == 1:
                    return [node.func.id]
        return []

    def modules(self) -> list[str]:
        """Return the modules that the tests import, or use as if they had."""
        found = [module for module, *_ in self.known.values()]
        for node in _nodes(self.statements):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.append(node.module)
        return sorted(set(found))

    def check_of(self, statement: ast.stmt) -> tuple[str, Callable[[Any], bool]] | None:
        """Return the expression that only the solution can compute, and what its value must fulfil.

        None where an assert computes anything else: that is not for this process.
        """
        if not isinstance(statement, ast.Assert):
            return None
        test = statement.test
        if self._is_of_solution(test):
            return ast.unparse(test), bool
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            if self._is_of_solution(test.operand):
                return ast.unparse(test.operand), operator.not_
            return None
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return None
        compare = _COMPARISONS[type(test.ops[0])]
        left = test.left
        right = test.comparators[0]
        try:
            if self._is_of_solution(left):
                literal = ast.literal_eval(right)
                check = functools.partial(_compared, compare, literal)
                expression = left
            elif self._is_of_solution(right):
                literal = ast.literal_eval(left)
                check = functools.partial(compare, literal)
                expression = right
            else:
                return None
        except ValueError:
            return None
        if compare in (operator.is_, operator.is_not) and not (literal is None or isinstance(literal, bool)):
            return None
        return ast.unparse(expression), check

    def _is_of_solution(self, node: ast.expr) -> bool:
        """Return whether an expression is a name of the solution or a call of one, with plain arguments.

        Methods are taken of a class, whose name has a capital, and of what is made by calling it: what a
        function returns is a value, whose methods are not the solution's.
        """
        if isinstance(node, ast.Name):
            built_in = hasattr(builtins, node.id) and node.id not in self.not_built_in
            return not built_in and node.id not in self.own and node.id not in self.known
        if isinstance(node, (ast.List, ast.Tuple)):
            return bool(node.elts) and all(self._is_of_solution(each) for each in node.elts)
        if isinstance(node, ast.Attribute):
            base = node.value.func if isinstance(node.value, ast.Call) else node.value
            return isinstance(base, ast.Name) and base.id[:1].isupper() and self._is_of_solution(node.value)
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            return self._is_of_solution(node.func) and all(map(self._is_argument, arguments))
        return False

    def _is_argument(self, node: ast.expr) -> bool:
        try:
            ast.literal_eval(node)
        except (ValueError, TypeError):
            return self._is_of_solution(node)
        return True


def _compared(compare: Callable[[Any, Any], Any], literal: Any, value: Any) -> bool:
    return bool(compare(value, literal))
