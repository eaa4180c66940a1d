"""docs/variables.md: the page of all variables, made from the schema so that the two cannot differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.spec.passthrough import OWNED_ENV, OWNED_FLAGS
from ppdeploy.spec.serve_options import PREFIXES, tables
from ppdeploy.spec.variables import VARIABLES, Scope, Variable

_SECTIONS: tuple[tuple[Scope, str, str], ...] = (
    (
        "pipeline",
        "For one pipeline",
        "The same for its hosts: set it in the vars of its group, or of `vllm`.",
    ),
    ("host", "For one host", "May differ from host to host: set it with the host, or with a group."),
    ("cluster", "For the cluster", "The same for all hosts: set it in the vars of the group `vllm`."),
)

_INTRO = """\
# Variables

<!-- Made by `ppdeploy docs-variables` from ppdeploy/spec/variables.py: edit that file, not this one. -->

The inventory is the only input. Each group below `vllm` is a pipeline: one model, served by the hosts of that
group in their order. What is not set has the default. A name that is not in these tables is refused, and so
is a value of another form; `ppdeploy plan` says both before any host is touched.
"""

_PASSED_ON = """\
## Passed on to vLLM

```yaml
ppdeploy_vllm_args:
  max-num-seqs: 64              # --max-num-seqs 64
  enable-prefix-caching: false  # --no-enable-prefix-caching
  compilation-config:           # --compilation-config '{"mode": 2}'
    mode: 2
ppdeploy_env:
  NCCL_DEBUG: INFO
```

Names are those of `vllm serve --help=all` without the dashes in front, and of environment variables. A name that
the pipeline's vLLM does not have is refused with the nearest ones, and so are a beginning of a name, a `no-` form
(write `enable-prefix-caching: false`) and a dotted name (write a map), and a flag with a value or a value without
one. The same holds for `vllm_args` of a sidecar. Known are the names of {}; with
another version of vLLM they are not judged.

What ppdeploy sets itself, or what cannot work in a pipeline, is refused:
"""

_SECRETS = """\
Names of secrets are refused in both (`api-key`, `..._TOKEN`, `..._PASSWORD` and the like): arguments and
environment are part of the plan and the release, which hold none.
"""


def variables_markdown() -> str:
    """Return the text of docs/variables.md."""
    parts = [_INTRO]
    for scope, title, sentence in _SECTIONS:
        rows = [_row(variable) for variable in VARIABLES.values() if variable.scope == scope]
        table = _table(("Variable", "Meaning", "Value", "Unit", "Default"), rows)
        parts.append(f"## {title}\n\n{sentence}\n\n{table}")
    versions = [f"{PREFIXES[device]}{table.version}" for device in PREFIXES for table in tables(device).values()]
    parts.append(_PASSED_ON.replace("{}", " and ".join(f"`{version}`" for version in versions)))
    parts.append(_table(("In `ppdeploy_vllm_args`", "Instead"), _by_remedy(OWNED_FLAGS)))
    parts.append(_table(("In `ppdeploy_env`", "Instead"), _by_remedy(OWNED_ENV)))
    parts.append(_SECRETS)
    return "\n".join(parts)


def check_docs(file: Path) -> None:
    """Raise InputError when the file is not the page that the schema makes."""
    if not file.is_file() or file.read_text(encoding="utf-8") != variables_markdown():
        raise InputError(
            "the page of variables is not the one that the schema makes",
            where=str(file),
            remedy=f"run `ppdeploy docs-variables > {file}`",
        )


def _row(variable: Variable) -> tuple[str, ...]:
    meaning = variable.sentence + (" **Secret.**" if variable.secret else "")
    return f"`{variable.name}`", meaning, variable.must, variable.unit, _default(variable)


def _default(variable: Variable) -> str:
    if variable.required:
        return f"**{variable.unset}**"
    if variable.default is None:
        return variable.unset
    if isinstance(variable.default, str | IPv4Network):
        return f"`{variable.default}`"
    return f"`{json.dumps(variable.default)}`"


def _by_remedy(owned: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return one row for all the names that have one remedy."""
    rows: dict[str, list[str]] = {}
    for name, remedy in owned.items():
        rows.setdefault(remedy, []).append(f"`{name}`")
    return [(", ".join(names), _capital(remedy)) for remedy, names in rows.items()]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
