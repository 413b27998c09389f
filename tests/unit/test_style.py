"""One thought a line: what the formatter does not see, in the sources of the packages."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")])
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def has_inside(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(part, kind) for part in ast.walk(node) if part is not node)


def is_condition(node: ast.AST) -> bool:
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("bool", "any", "all")
    return negated or call or isinstance(node, ast.Compare | ast.BoolOp)


def is_multiplied_list(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return isinstance(node.left, ast.List | ast.JoinedStr) and is_condition(node.right)


def assigns_unrelated_values(node: ast.AST) -> bool:
    """Whether a tuple of targets gets a tuple of values, none of which reads one of the targets."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or any(isinstance(t, ast.Starred) for t in target.elts):
        return False
    read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
    return not {ast.unparse(element) for element in target.elts} & read


def is_spread_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return any(k.arg is None and isinstance(k.value, ast.Dict) for k in node.keywords)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return any(key is None and isinstance(value, ast.Dict) for key, value in pairs)
    return False


RULES = {
    "a conditional expression inside another": lambda node: (
        isinstance(node, ast.IfExp) and has_inside(node, ast.IfExp)
    ),
    "a comprehension with three loops": lambda node: (
        isinstance(node, COMPREHENSIONS) and len(node.generators) > 2
    ),
    "a list or text times a condition": is_multiplied_list,
    "unrelated values in one assignment": assigns_unrelated_values,
    "** of a literal": is_spread_literal,
}


def find(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, rule) of each line that breaks a rule."""
    for node in ast.walk(ast.parse(text)):
        for rule, is_broken in RULES.items():
            if is_broken(node):
                yield node.lineno, rule


def test_no_line_of_the_packages_breaks_a_rule():
    found = [
        f"{path.relative_to(ROOT)}:{line} {rule}"
        for path in FILES
        for line, rule in find(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("a conditional expression inside another", "x = a if b else c if d else e"),
        ("a comprehension with three loops", "x = [a for b in c for d in b for a in d]"),
        ("a list or text times a condition", "x = ['a'] * (b > c)"),
        ("a list or text times a condition", "x = [a] * bool(b)"),
        ("unrelated values in one assignment", "a, b = 1, f(c)"),
        ("unrelated values in one assignment", "self.a, b[0] = 1, self.f(c)"),
        ("** of a literal", "f(**{'a': 1})"),
        ("** of a literal", "x = {'a': 1, **{'b': 2}}"),
    ],
)
def test_each_rule_finds_what_it_names(rule, text):
    assert list(find(text)) == [(1, rule)]


def test_a_swap_is_one_thought():
    assert list(find("a, b = b, a")) == []
