"""Every user's mistake is reported with its next step."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def without_next_step(source: str) -> list[str]:
    """First arguments of calls of UserError that pass neither `next` nor facts gathered elsewhere (`**facts`)."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    errors = (call for call in calls if "UserError" in (getattr(call.func, "id", ""), getattr(call.func, "attr", "")))
    return [ast.unparse(call.args[0]) for call in errors if not {"next", None} & {word.arg for word in call.keywords}]


def test_every_user_error_has_a_next_step():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    missing = {str(path.relative_to(ROOT)): found for path in files if (found := without_next_step(path.read_text()))}
    assert missing == {}


def test_a_call_without_a_next_step_is_found():
    calls = 'UserError("a", file=1)\nUserError("b", next="c")\nUserError("d", **facts)\nerrors.UserError("e")\n'
    assert without_next_step(calls) == ["'a'", "'e'"]
