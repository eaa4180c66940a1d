#!/usr/bin/env python3
"""Write which model classes of a vLLM can be split over a pipeline, read from its source without importing it.

    scripts/pipeline_models.py SITE_PACKAGES > ppdeploy/plan/pipeline_models.json

SITE_PACKAGES is the folder that holds an unpacked `vllm`. An architecture of vLLM's registry counts as `yes` when
`SupportsPP` is among the bases of its class, or of theirs, as `no` when all of them are known and it is not, and is
left out when a base cannot be found in the source.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

TABLES = (
    *("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"),
    *("_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS"),
)
"""The tables of vllm/model_executor/models/registry.py whose models generate text."""

OUTSIDE = frozenset({"Module", "Protocol", "object", "Generic", "ABC", "PreTrainedModel"})
"""Bases from other packages, which say nothing on pipelines."""


class Source:
    """The classes and imports of vLLM's modules, each parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Return the parsed module, or None when there is no such file."""
        if module not in self.trees:
            path = self.root.joinpath(*module.split("."))
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            self.trees[module] = ast.parse(files[0].read_text()) if files else None
        return self.trees[module]

    def is_package(self, module: str) -> bool:
        """Whether the module is a folder, which relative imports start at."""
        return self.root.joinpath(*module.split("."), "__init__.py").is_file()

    def find(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> list[tuple[str, ast.ClassDef]]:
        """Return the classes that a name in a module can stand for, through imports (several behind an `if`)."""
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return []
        seen = seen | {(module, name)}
        found: list[tuple[str, ast.ClassDef]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                found.append((module, node))
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found += self.find(self.absolute(module, node), alias.name, seen)
            elif (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Name)
                and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
            ):
                found += self.find(module, node.value.id, seen)
        return found or self.lazily(module, tree, name, seen)

    def lazily(
        self, module: str, tree: ast.Module, name: str, seen: frozenset[tuple[str, str]]
    ) -> list[tuple[str, ast.ClassDef]]:
        """Follow the packages that import a class only when it is asked for: any submodule that they name."""
        if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
            return []
        found: list[tuple[str, ast.ClassDef]] = []
        for file in sorted(self.root.joinpath(*module.split(".")).rglob("*.py")):
            inner = ".".join(file.relative_to(self.root).with_suffix("").parts)
            if not inner.endswith("__init__") and re.search(rf"^class {name}\b", file.read_text(), re.MULTILINE):
                found += self.find(inner, name, seen)
        return found

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module that a `from ... import` names, in full."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (1 if self.is_package(module) else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def supports(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> bool | None:
        """Say whether a class has SupportsPP among its ancestors; None when one of them is not found."""
        if name == "SupportsPP":
            return True
        if name in OUTSIDE or (module, name) in seen:
            return False
        classes = self.find(module, name)
        if not classes:
            return None
        answers: list[bool | None] = []
        for place, node in classes:
            for base in node.bases:
                inner = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(inner, ast.Attribute):
                    answers.append(False if inner.attr in OUTSIDE else None)
                elif isinstance(inner, ast.Name):
                    answers.append(self.supports(place, inner.id, seen | {(module, name)}))
        if any(answers):
            return True
        return None if None in answers else False


def registry(source: Source) -> dict[str, tuple[str, str]]:
    """Return architecture -> (module, class) of the tables."""
    tree = source.tree("vllm.model_executor.models.registry")
    if tree is None:
        raise SystemExit("pipeline_models: there is no vllm/model_executor/models/registry.py in that folder")
    found: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in TABLES:
            found |= ast.literal_eval(node.value)
    return found


def main() -> None:
    """Print the table as JSON."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    root = Path(sys.argv[1])
    source = Source(root)
    answers: dict[str, bool | None] = {}
    for architecture, (module, name) in sorted(registry(source).items()):
        full = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        answers[architecture] = source.supports(full, name)
    version = re.search(
        r"(?:__version__ = version|^version) = '([^']+)'", (root / "vllm/_version.py").read_text(), re.MULTILINE
    )
    document = {
        "vllm_version": version.group(1) if version else "unknown",
        "made_by": "scripts/pipeline_models.py",
        "yes": [name for name, answer in answers.items() if answer],
        "no": [name for name, answer in answers.items() if answer is False],
    }
    print(json.dumps(document, indent=1))
    unknown = [name for name, answer in answers.items() if answer is None]
    print(f"left out, a base was not found: {', '.join(unknown) or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    main()
