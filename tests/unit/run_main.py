"""A process of its own that runs one playbook of the test project, for tests that send it signals."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ppdeploy.run import Passwords, PlayOptions, run_playbook
from tests.unit.run_support import PROJECT

if __name__ == "__main__":
    playbook, inventory, *extra = sys.argv[1:]
    word = os.environ.pop("TEST_BECOME_PASSWORD", None)
    result = run_playbook(
        playbook,
        inventory=Path(inventory),
        root=PROJECT,
        options=PlayOptions(extra_vars=tuple(extra)),
        passwords=Passwords(become=word),
        json_events=True,
    )
    sys.stderr.write(f"outcome: {result.status}\n" + "".join(f"{failure}\n" for failure in result.failures))
    sys.exit(result.exit_code)
