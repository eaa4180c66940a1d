"""Print the time of an apply that changes nothing, as a ratio to Ansible's setup module on the same hosts.

The ratio is what can be compared between machines: both sides pay for the same connections, forks and Python
starts. Rounds of both alternate, so that a busy moment does not fall on one side alone; medians are compared.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOAL = 6.0
"""Issue 2 aims for this ratio or less on two hosts."""


def main() -> int:
    """Run the measurement; 0 when every measured apply changed nothing, whatever the ratio is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-i", "--inventory", type=Path, default=ROOT / "inventory/lab")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is timed (default 3)")
    options = parser.parse_args()
    if not options.inventory.exists():
        print(
            f"error: no inventory ({options.inventory}): run `ppdeploy lab up` and `ppdeploy apply` first",
            file=sys.stderr,
        )
        return 2
    # The first apply settles the hosts and opens the connections that all timed runs share.
    changed, _ = apply(options.inventory)
    if changed:
        print(f"the first apply changed {changed} things; the timed ones must change nothing")
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(1, options.rounds + 1):
        theirs.append(setup(options.inventory))
        changed, seconds = apply(options.inventory)
        if changed:
            print(f"error: apply {number} of a settled cluster changed {changed} things", file=sys.stderr)
            return 1
        ours.append(seconds)
        print(f"round {number}: setup {theirs[-1]:.2f} s, apply {ours[-1]:.2f} s")
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(
        f"no-change apply: {statistics.median(ours):.2f} s, setup module: {statistics.median(theirs):.2f} s, "
        f"ratio {ratio:.1f} (the goal is {GOAL:.0f} or less)"
    )
    return 0


def apply(inventory: Path) -> tuple[int, float]:
    """Return how many tasks of one `ansible-playbook site.yml` changed something, and its time in seconds."""
    output, seconds = timed("ansible-playbook", "--inventory", inventory, "site.yml")
    counts = [int(number) for number in re.findall(r"\bchanged=(\d+)", output)]
    if not counts:
        sys.exit(f"error: ansible-playbook printed no recap:\n{output}")
    return sum(counts), seconds


def setup(inventory: Path) -> float:
    """Return the time of the setup module on all hosts in seconds."""
    return timed("ansible", "--inventory", inventory, "vllm", "--module-name", "ansible.builtin.setup")[1]


def timed(program: str, *arguments: str | Path) -> tuple[str, float]:
    """Run one of Ansible's programs from this virtual environment; return its output and time in seconds."""
    command = [Path(sys.executable).with_name(program), *arguments]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    if done.returncode:
        sys.exit(f"error: {program} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout, seconds


if __name__ == "__main__":
    sys.exit(main())
