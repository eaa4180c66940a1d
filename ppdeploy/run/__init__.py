"""Running playbooks through ansible-runner: environment, lock, progress, clean end, outcome as data."""

from ppdeploy.run import plays
from ppdeploy.run.lock import cluster_lock
from ppdeploy.run.playbook import PlayOptions, run_playbook
from ppdeploy.run.progress import Progress, QuietProgress, progress
from ppdeploy.run.redact import Redactor
from ppdeploy.run.result import Failure, HostStats, RunResult
from ppdeploy.run.secrets import Passwords, VaultOptions, ask_passwords

__all__ = [
    "Failure",
    "HostStats",
    "Passwords",
    "PlayOptions",
    "Progress",
    "QuietProgress",
    "Redactor",
    "RunResult",
    "VaultOptions",
    "ask_passwords",
    "cluster_lock",
    "plays",
    "progress",
    "run_playbook",
]
