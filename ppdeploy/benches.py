"""The benchmarks that a cluster keeps: one file each, on the controller, beside its inventory."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from ppdeploy.errors import InputError
from ppdeploy.paths import kept_dir
from ppdeploy.plan.bench import BENCH_SCHEMA, BenchRun

#: Files of a pipeline that are read, the newest: a plan is made often, and what was long ago says less.
MOST_READ = 20


def bench_folder(inventory_dir: Path, pipeline: str) -> Path:
    """Return where the benchmarks of a pipeline are kept; hidden, since Ansible reads other files as inventories."""
    return kept_dir(inventory_dir) / "bench" / pipeline


def bench_file(inventory_dir: Path, run: BenchRun) -> Path:
    """Return the file of a benchmark, named by its time and release."""
    moment = datetime.fromisoformat(run.time)
    return bench_folder(inventory_dir, run.pipeline) / f"{moment:%Y%m%dT%H%M%SZ}-{run.release[:12]}.json"


def bench_text(run: BenchRun) -> str:
    """Return what the file of a benchmark holds."""
    return run.model_dump_json(indent=1) + "\n"


def read_benches(inventory_dir: Path) -> tuple[BenchRun, ...]:
    """Return the kept benchmarks of all pipelines, the oldest of each first.

    One of another version of ppdeploy, with another form, is left out. Raises InputError for a file that cannot be
    read: half of a measurement would be worse than none.
    """
    top = kept_dir(inventory_dir) / "bench"
    if not top.is_dir():
        return ()
    found = []
    for folder in sorted(path for path in top.iterdir() if path.is_dir()):
        for file in sorted(folder.glob("*.json"))[-MOST_READ:]:
            try:
                document = json.loads(file.read_text(encoding="utf-8"))
                if not isinstance(document, dict):
                    raise ValueError("it is no object")
                if document.get("bench_schema") == BENCH_SCHEMA:
                    found.append(BenchRun.model_validate(document))
            except (OSError, ValueError) as error:
                raise InputError(
                    f"a kept benchmark cannot be read: {_short(error)}",
                    where=str(file),
                    remedy="delete the file, and run `ppdeploy bench` again",
                ) from error
    return tuple(found)


def _short(error: Exception) -> str:
    """Return the first thing that is wrong with a file, in a line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0]
