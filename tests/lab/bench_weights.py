"""Print how long a model takes to three hosts over links of one rate, against the rate itself and against scp.

    python -m tests.lab.bench_weights [--gigabytes 2] [--rate-mbit 1000] [--weights full] [--skip-scp]

The model lies on the controller. Ours: the controller sends it to the first host, and each hands it on to the next as
it arrives; all is hashed on the way. scp: the whole to each host, one after the other, as the controller has one link.
Both are timed in one run of this program, since only their ratio can be compared between machines.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.state import default_name
from ppdeploy.lab.tiny_model import make_noise_model
from ppdeploy.paths import data_root
from ppdeploy.run.environment import search_path
from tests.lab.cluster import Cluster, role_plays, values_words

GOAL = 1.15
"""What the time may be of that which the slowest link needs for its bytes."""
PAYLOAD = 117e6
"""Bytes a second that TCP carries over 1 Gbit/s."""
LAYERS = 32
NODES = 3


def main() -> int:
    """Run the measurement; 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rate-mbit", type=int, default=1000, help="of every host's links, in both directions")
    parser.add_argument("--weights", choices=["full", "stage"], default="full", help="what the later hosts get")
    parser.add_argument("--skip-scp", action="store_true")
    options = parser.parse_args()
    lab = Lab(f"{default_name()}-bench-weights")
    with tempfile.TemporaryDirectory(
        prefix="ppdeploy-bench-weights-", dir=os.environ.get("PPDEPLOY_BENCH_DIR")
    ) as work:
        # A file for each layer, of about 18 x hidden^2 bytes.
        hidden = int((options.gigabytes * 1e9 / LAYERS / 19.5) ** 0.5) // 8 * 8
        model = make_noise_model(Path(work, "noise"), layers=LAYERS, hidden=hidden)
        size = sum(path.stat().st_size for path in model.iterdir())
        described = LabInventory.one_pipeline(
            NODES,
            model=str(model),
            vars={"ppdeploy_weights": options.weights, "ppdeploy_layer_partition": [10, 11, 11]},
        )
        try:
            lab.down()
            cluster = Cluster(lab, lab.up(NODES, inventory=described, owner=os.getpid()), Path(work), [])
            for node in lab.nodes:
                lab.shape(node, f"{options.rate_mbit}mbit", "both")
            return measure(cluster, model, size, options)
        finally:
            lab.down()


def measure(cluster: Cluster, model: Path, size: int, options: argparse.Namespace) -> int:
    """Time both ways and print what they came to."""
    bound = size / (PAYLOAD * options.rate_mbit / 1000)
    files = len(list(model.glob("*.safetensors")))
    say(
        f"{size / 1e9:.2f} GB in {files} weight files to {NODES} hosts ({options.weights}) over "
        f"{options.rate_mbit} Mbit/s; the slowest link needs {bound:.1f} s"
    )
    busy = busy_seconds()
    ours, whole = timed_role(cluster)
    cores = (busy_seconds() - busy) / whole
    say(
        f"ppdeploy: {ours:.1f} s, {ours / bound:.2f} of that (the goal is {GOAL}), hashed and checked; {whole:.1f} s "
        f"with the role's other tasks; {cores:.1f} of this machine's {os.cpu_count()} cores were busy"
    )
    for node in cluster.lab.nodes:
        cluster.out(node, "rm -rf /var/lib/ppdeploy/models")
    if not options.skip_scp:
        theirs = timed_scp(cluster, model)
        say(f"scp of the whole to each host: {theirs:.1f} s, nothing checked; {theirs / ours:.1f} times as long")
    return 0 if ours <= GOAL * bound else 1


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def timed_role(cluster: Cluster) -> tuple[float, float]:
    """Return how long the bytes took, from the first one sent to the last node's last check, and the whole role."""
    command = cluster.book_command("model_store", role_plays("model_store"), *values_words())
    stamps: list[tuple[float, str]] = []
    with subprocess.Popen(
        command,
        cwd=data_root(),
        env={**os.environ, "PATH": search_path(), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        stamps += [(time.monotonic(), line) for line in running.stdout]
    if running.returncode:
        sys.exit("error: the role failed:\n" + "".join(line for _, line in stamps))

    def at(text: str) -> float:
        return next(stamp for stamp, line in stamps if text in line)

    role = at("TASK [model_store : ")
    return at("Serve no longer") - at("Copy the files from the controller"), at("PLAY RECAP") - role


def timed_scp(cluster: Cluster, model: Path) -> float:
    """Return how long scp takes to copy the folder to each host, one after the other."""
    lab = cluster.lab
    began = time.monotonic()
    for node in lab.nodes:
        target = f"root@{lab.management_address(node)}:/var/lib/copied"
        subprocess.run(["scp", "-q", "-r", *lab.ssh.options(), str(model), target], check=True)
    return time.monotonic() - began


def busy_seconds() -> float:
    """Return the seconds that all cores were at work since the machine started."""
    fields = [int(text) for text in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    # The fourth and fifth are idle and waiting for disks.
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
