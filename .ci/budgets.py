"""Count lines, print the counts, and exit with 1 if one is over its budget."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = {"rag.py": 1080, "README.md": 280}
LINES |= {f"tests/recipes/{name}.py": 120 for name in ("vector_database", "agent")}
CODE, FUNCTION = 700, 40  # lines of code of rag.py, and of each of its functions


def code_lines(source: str, node: ast.AST) -> int:
    """Return the number of lines without blank lines, comments and docstrings."""
    lines = source.split("\n")
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", len(lines))
    kept = {i for i in range(first, last + 1) if lines[i - 1].strip()[:1] not in ("", "#")}
    for each in ast.walk(node):
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            kept -= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    return len(kept)


def counts() -> list[tuple[str, int, int]]:
    """Return [(what is counted, lines, budget)]."""
    found = [(f"{name}, lines", lines_of(name), most) for name, most in LINES.items()]
    source = (ROOT / "rag.py").read_text("utf-8")
    tree = ast.parse(source)
    found.append(("rag.py, lines of code", code_lines(source, tree), CODE))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    longest = max(functions, key=lambda node: code_lines(source, node))
    found.append((f"rag.py, {longest.name}()", code_lines(source, longest), FUNCTION))
    return found


def lines_of(name: str) -> int:
    """Return the number of lines of a file."""
    return len((ROOT / name).read_text("utf-8").splitlines())


over = 0
for what, number, most in counts():
    over += number > most
    print(f"{what}: {number} of {most}{' OVER' * (number > most)}")
sys.exit(1 if over else 0)
