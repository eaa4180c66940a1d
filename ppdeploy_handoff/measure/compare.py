"""compare.py VERSION FOLDER: what changed in the vLLM source in FOLDER (its package `vllm`) at each replaced place.

Prints each place of `ppdeploy_handoff.places` whose text in VERSION is not one that was read, and the line to add to
the table once it has been. Exit status 1 when there is one.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path

# Not installed: this script belongs to the checkout.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from ppdeploy_handoff.places import PLACES


def text_of(source: str, name: str) -> str | None:
    """The text of a class, a function or a method (`Class.method`) in a module, decorators included; None without one.

    The text and not a parsed tree, whose form differs between versions of Python.
    """
    body = ast.parse(source).body
    found: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None = None
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            return None
        body = found.body
    assert found is not None and found.end_lineno is not None
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : found.end_lineno])


def digest(folder: Path, file: str, name: str) -> str:
    """The first 8 digits of the sha256 of a place's text; `-` where there is no such file or name."""
    path = folder / file
    text = text_of(path.read_text("utf-8"), name) if path.is_file() else None
    return "-" if text is None else hashlib.sha256(text.encode()).hexdigest()[:8]


def main(version: str, folder: Path) -> int:
    """Print the differences; 1 when there is one that nobody has read."""
    unread = 0
    for place in PLACES:
        found = digest(folder, place.file, place.name)
        if found in place.read:
            versions = ", ".join(place.read[found])
            print(f"same as in {versions}: {place.file} {place.name}")
        else:
            unread += 1
            print(f'UNREAD: {place.file} {place.name}: {place.relied_on}\n  "{found}": ("{version}",),')
    return 1 if unread else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
