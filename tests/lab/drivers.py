"""What the proofs of `nvidia_driver` on the lab share: made-up packages, and a play that a test may tell its facts.

What a host has no part of (the card, Secure Boot, nouveau) is put into the facts that it gave.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppdeploy.facts import NodeFacts, PciAccelerator
from ppdeploy.lab.ready import tiny_model
from ppdeploy.paths import data_root
from ppdeploy.plan.driver import FILES
from ppdeploy.play import drivers_of_play
from tests.lab.cluster import Cluster, Done, values_words

VERSION = "580.95.05-1"
NEWER = "610.57.04-1"
"""What the mirror has of the branch that is wanted, and of one that is not."""

CARD = PciAccelerator(address="0000:01:00.0", vendor="nvidia", vendor_id="0x10de", device_id="0x2684", driver=None)

SMI = r"""#!/bin/sh
case "$1" in
  --query-gpu=driver_version) echo 580.95.05 ;;
  --query-gpu=*)
    echo '0, GPU-1, 24564, 1, 580.95.05, 00000000:01:00.0, 4, 4, 16, 16, [N/A], [N/A], Enabled, [N/A], 8.9, RTX 4090' ;;
esac
"""

#: Makes the packages, in both branches, and the mirror's indices, in the current folder; signs nothing.
PACKAGES = r"""
make() {
  mkdir -p "build/$1/DEBIAN"
  printf 'Package: %s\nVersion: %s\nArchitecture: all\nMaintainer: lab <lab@example.org>\n' "$1" "$2" \
    > "build/$1/DEBIAN/control"
  echo 'Description: lab' >> "build/$1/DEBIAN/control"
  test -z "$3" || echo "Depends: $3" >> "build/$1/DEBIAN/control"
  dpkg-deb --root-owner-group --build "build/$1" "$1_$2.deb" > /dev/null
}
mkdir -p build/nvidia-driver-cuda/usr/bin
cp smi build/nvidia-driver-cuda/usr/bin/nvidia-smi
chmod 755 build/nvidia-driver-cuda/usr/bin/nvidia-smi
for version in VERSION NEWER; do
  make libcuda1 $version
  make nvidia-driver-cuda $version "libcuda1 (= $version)"
  make nvidia-open $version "nvidia-driver-cuda (= $version)"
done
make "linux-headers-$(uname -r)" 1
make nvidia-container-toolkit 1.18.0
rm -r build
for file in *.deb; do
  dpkg-deb --field "$file"
  printf 'Filename: ./%s\nSize: %s\n' "$file" "$(stat -c %s "$file")"
  printf 'SHA256: %s\n\n' "$(sha256sum "$file" | cut -d' ' -f1)"
done > Packages
printf 'Origin: NVIDIA\nLabel: NVIDIA CUDA\nSuite: \nSHA256:\n %s %s Packages\n' \
  "$(sha256sum Packages | cut -d' ' -f1)" "$(stat -c %s Packages)" > Release
"""

#: Runs the facts module without Ansible, which takes a tenth of the time; what it is asked comes as the argument.
_FACTS = r"""
import json, sys, types
for name in ("ansible", "ansible.module_utils", "ansible.module_utils.basic"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["ansible.module_utils.basic"].AnsibleModule = object
code = compile(sys.stdin.read(), "ppdeploy_facts.py", "exec")
scope = {"__name__": "ppdeploy_facts"}
exec(code, scope)
print(json.dumps(scope["collect"](json.loads(sys.argv[1]))))
"""

#: All that the role could touch of a host.
_STATE = r"""
dpkg-query --show --showformat='${Package} ${Version} ${db:Status-Want} ${db:Status-Status}\n' | sort
find /etc/apt /etc/modprobe.d /usr/share/keyrings -type f -exec sha256sum {} + | sort
cat /proc/sys/kernel/random/boot_id
"""


@dataclass
class Driven(Cluster):
    """The lab as a cluster for which drivers are decided and brought, from facts that a test may change."""

    def state(self) -> dict[str, list[str]]:
        """Return packages, files and boot of the hosts."""
        return {node: self.out(node, _STATE).splitlines() for node in self.lab.nodes}

    def facts(self) -> dict[str, NodeFacts]:
        """Return what the hosts say of themselves now."""
        asked = {
            "paths": ["/opt/ppdeploy"],
            "ports": [],
            "pipelines": ["tiny"],
            "files": list(FILES),
            "venvs": False,
            "models": False,
            "models_dir": "/var/lib/ppdeploy/models",
            "driver": True,
            "peers": [],
            "controller_time": None,
        }
        code = (data_root() / "plugins/modules/ppdeploy_facts.py").read_text(encoding="utf-8")
        found = {}
        for node in self.lab.nodes:
            words = ["python3", "-I", "-c", _FACTS, json.dumps(asked)]
            found[node] = NodeFacts.from_module(node, json.loads(self.lab.exec_ssh(node, words, stdin=code).stdout))
        return found

    def decide(self, facts: Mapping[str, NodeFacts], **wants: Any) -> dict[str, Any]:
        """Return what the play decides about the drivers, by these facts and variables; None takes one out."""
        variables = {
            "ppdeploy_model": str(tiny_model()),
            "ppdeploy_nvidia_repository": "http://127.0.0.1:8089/cuda",
            "ppdeploy_nvidia_repository_key": str(self.elsewhere / "mirror.asc"),
            **{f"ppdeploy_{name}": value for name, value in wants.items()},
        }
        variables = {name: value for name, value in variables.items() if value is not None}
        values = {node: {**variables, "ansible_host": f"198.18.0.{rank}"} for rank, node in enumerate(facts, 11)}
        inventory = {
            "pipelines": {"tiny": list(facts)},
            "hosts": list(facts),
            "values": values,
            "directory": str(self.elsewhere),
        }
        return drivers_of_play(inventory, {node: own.model_dump(mode="json") for node, own in facts.items()})

    def drive(self, decided: Mapping[str, Any], *words: str) -> Done:
        """Run playbooks/driver.yml with what was decided, in place of what it would decide by itself."""
        (play,) = yaml.safe_load((data_root() / "playbooks/driver.yml").read_text(encoding="utf-8"))
        tasks = yaml.safe_load((data_root() / "playbooks/tasks/driver.yml").read_text(encoding="utf-8"))
        (refuse,) = [task for task in tasks if "ansible.builtin.assert" in task]
        # As tasks/values.yml does, which is left out here: our filters are loaded once, and not by every worker anew.
        play["pre_tasks"] = [{**refuse, "throttle": "{{ [] | ppdeploy_public_names | length }}"}]
        values = self.elsewhere / "decided.json"
        values.write_text(json.dumps({"ppdeploy__drivers": decided}), encoding="utf-8")
        return self.book("drive", play, *values_words(), "-e", f"@{values}", *words)


def with_card(facts: Mapping[str, NodeFacts], **changes: Mapping[str, Any]) -> dict[str, NodeFacts]:
    """Return facts of hosts that have a card and Debian's contrib; `changes` are fields of a host's driver facts."""
    found = {}
    for node, own in facts.items():
        assert own.driver is not None
        update = {"components": ("contrib", "main"), **changes.get(node, {})}
        found[node] = own.model_copy(
            update={"pci_accelerators": (CARD,), "driver": own.driver.model_copy(update=update)}
        )
    return found


def told(done: Done) -> str:
    """Return what a play printed, in one line: Ansible folds long messages."""
    return " ".join(done.out.split())


def gpg(folder: Path, *words: str, stdin: str = "") -> str:
    """Run gpg with a key of the test's own, which is made where there is none, and written to `mirror.asc`."""
    home = folder / "gnupg"
    common = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", ""]
    if not home.exists():
        home.mkdir(mode=0o700)
        subprocess.run([*common, "--quick-gen-key", "Mirror <mirror@example.org>", "rsa3072"], check=True)
        key = subprocess.run([*common, "--armor", "--export"], check=True, capture_output=True, text=True).stdout
        (folder / "mirror.asc").write_text(key, encoding="utf-8")
    return subprocess.run([*common, *words], check=True, input=stdin, capture_output=True, text=True).stdout
