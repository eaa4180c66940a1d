"""What the proofs on the lab are written in: commands as a person types them, and looks at the hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import CPU_VLLM_ARGS, LabInventory
from ppdeploy.lab.ready import tiny_model
from ppdeploy.paths import data_root
from ppdeploy.plan import Plan
from ppdeploy.run.environment import search_path

PIPELINE = "tiny"

PROMPTS = (
    "Hello",
    "The capital of France is",
    "1, 2, 3, 4,",
    "def main():",
    "Once upon a time there was a machine that",
    "Pipeline parallelism splits the layers of a model over several machines, so that each of them",
)
"""What completions are compared by: the model answers each otherwise."""

#: Everything of ours on a host and what decides how it is run, but not what running ranks and unpacked wheels write.
_LISTING = r"""
getent passwd; getent group
for path in /etc/systemd /opt /var/lib/ppdeploy /var/cache/ppdeploy; do
  test ! -e $path || find $path -path '/opt/ppdeploy/venvs/*/*' -prune -o -path '/var/cache/ppdeploy/*/*' -prune \
    -o -path '/var/lib/ppdeploy/*/*' -not -path '/var/lib/ppdeploy/models*' -prune \
    -o -type d -printf '%p %M %u:%g\n' -o -printf '%p %M %u:%g %T@ %l\n' -type f -exec sha256sum {} +
done | sort
"""


def described() -> LabInventory:
    """Return what the lab's inventory is to say: one pipeline over both hosts."""
    # vLLM's own limit for a step that never ends; its 300 s would make each fault take as long.
    # A parser, without which vLLM refuses to be asked for a call of a tool.
    tools = {"enable-auto-tool-choice": True, "tool-call-parser": "pythonic"}
    variables = {
        "ppdeploy_env": {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20"},
        "ppdeploy_vllm_args": {**CPU_VLLM_ARGS, **tools},
    }
    # Tied, which is the harder one to divide: tests/lab/test_uneven.py gives each stage its own files.
    return LabInventory.one_pipeline(2, model=str(tiny_model(tied=True)), vars=variables)


@dataclass(frozen=True)
class Done:
    """A command that has ended, and how long it took in seconds."""

    command: str
    code: int
    out: str
    err: str
    seconds: float

    @property
    def said(self) -> str:
        """All that it printed, for the message of a failed assertion."""
        return f"`{self.command}` ended with {self.code}\n{self.out[-6000:]}\n{self.err[-6000:]}"

    @property
    def result(self) -> dict[str, Any]:
        """The last line that it printed with --json: what the verb came to."""
        found: dict[str, Any] = json.loads(self.out.strip().splitlines()[-1])
        return found

    def changed(self) -> dict[str, int]:
        """Return how many tasks changed something, by host: of the recap of `ansible-playbook`, or of --json."""
        recap = re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", self.out, re.MULTILINE)
        if recap:
            return {host: int(count) for host, count in recap}
        return {host: stats["changed"] for host, stats in self.result["hosts"].items()}

    @property
    def error(self) -> str:
        """The one sentence of a verb that failed: the line on stderr that starts with `error: `."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, f"no one sentence: {self.said}"
        return lines[0].removeprefix("error: ")


@dataclass(frozen=True)
class FirstApply:
    """What happened from the bare hosts on: files and accounts before and after `--check`, and the first apply."""

    bare: dict[str, list[str]]
    check: Done
    after_check: dict[str, list[str]]
    apply: Done
    beyond: dict[str, int]
    """Packets to addresses beyond the lab during the apply, of the controller and of the hosts."""


@dataclass
class Cluster:
    """The lab as a cluster that `ppdeploy` works on.

    `inventory` and `extra` are what it runs by at the moment; `stages` is what took how long.
    """

    lab: Lab
    inventory: Path
    elsewhere: Path
    stages: list[tuple[str, float]]
    extra: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    """Words before every command."""
    notes: dict[str, Any] = field(default_factory=dict)

    def ppdeploy(self, *words: str, inventory: Path | None = None, env: Mapping[str, str] | None = None) -> Done:
        """Run a verb from another folder than the checkout's, with the inventory and what else it runs by."""
        return self._run(self._verb(words, inventory), " ".join(("ppdeploy", *words)), cwd=self.elsewhere, env=env)

    def start_ppdeploy(self, *words: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a verb, in a process group of its own as a terminal does; its stdout and stderr are pipes."""
        return subprocess.Popen(
            # Also where the tests run in the background, in which SIGINT is ignored.
            ["env", "--default-signal=INT", *self._verb(words, None)],
            cwd=self.elsewhere,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def _verb(self, words: Sequence[str], inventory: Path | None) -> list[str]:
        where = ["-i", str(inventory or self.inventory), *self.extra]
        return [sys.executable, "-m", "ppdeploy", *words, *where]

    def ansible_playbook(self, *words: str, playbook: str = "site.yml") -> Done:
        """Run the whole cluster's playbook, or another one, by hand, from the checkout with its ansible.cfg."""
        program = Path(sys.executable).with_name("ansible-playbook")
        command = [str(program), "-i", str(self.inventory), *self.extra, *words, playbook]
        return self._run(command, " ".join(("ansible-playbook", *words)), cwd=data_root(), env={"PATH": search_path()})

    def testinfra(self, *files: str, hosts: str = "vllm", plan: Path | None = None) -> tuple[Done, set[str]]:
        """Run testinfra's files (all where none is named) and return which tests failed, as `file::test host`.

        The plan is made anew where none is given.
        """
        report = self._testinfra_report
        folder = data_root() / "tests" / "testinfra"
        command = [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *(f"--hosts=ansible://{hosts}", f"--ansible-inventory={self.inventory}"),
            *(["--plan", str(plan)] if plan else []),
            *map(str, [folder / f"{name}.py" for name in files] or [folder]),
        ]
        name = " ".join(("testinfra", *files)) + ("" if hosts == "vllm" else f" on {hosts}")
        done = self._run(command, name, cwd=data_root(), env={"PYTEST_ADDOPTS": ""})
        assert done.code in (0, 1), done.said
        return done, {f"{test} {host}" for test, host, failed in _cases(report) if failed}

    def tested(self) -> set[str]:
        """Return the hosts that the last run of `testinfra` looked at."""
        return {host for _, host, _ in _cases(self._testinfra_report)}

    @property
    def _testinfra_report(self) -> Path:
        return self.elsewhere / "testinfra.xml"

    def _run(self, command: Sequence[str], name: str, *, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
        began = time.monotonic()
        done = subprocess.run(
            [*self.prefix, *command],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
        self.stages.append((f"{name} [{done.returncode}]", seconds))
        return Done(name, done.returncode, done.stdout, done.stderr, seconds)

    def variant(self, path: Path, **variables: Any) -> Path:
        """Write the inventory to `path` with other variables of its pipeline, by their names without `ppdeploy_`.

        None removes a variable, a map is added to the one that is there. Returns the path.
        """
        tree = yaml.safe_load(self.inventory.read_text())["vllm"]
        own = tree["children"][PIPELINE]["vars"]
        for name, value in variables.items():
            key = f"ppdeploy_{name}"
            before = own.pop(key, tree["vars"].pop(key, None))
            if value is not None:
                own[key] = {**(before or {}), **value} if isinstance(value, dict) else value
        path.write_text(yaml.safe_dump({"vllm": tree}, sort_keys=False))
        return path

    # -- what the hosts are like --------------------------------------------------------------------------

    def out(self, node: str, script: str) -> str:
        """Run a shell script on a host and return what it printed."""
        return self.lab.exec_ssh(node, ["sh", "-ec", script]).stdout.strip()

    def listing(self) -> dict[str, list[str]]:
        """Return accounts, and files with mode, owner, time, target and sha256, by host."""
        return {node: self.out(node, _LISTING).splitlines() for node in self.lab.nodes}

    def pids(self, pipeline: str = PIPELINE) -> dict[str, int]:
        """Return the process of each host's rank; 0 where none runs."""
        script = f"systemctl show --property=MainPID --value ppdeploy-rank@{pipeline}.service"
        return {node: int(self.out(node, script)) for node in self.lab.nodes}

    def status(self, node: str = "node1") -> dict[str, Any]:
        """Return what the agent on a host knows; empty while it does not answer."""
        words = ["python3", "-I", "/opt/ppdeploy/agent/agent.pyz", "status"]
        text = self.lab.exec_ssh(node, words, check=False).stdout
        return dict(json.loads(text)) if text else {}

    def wait_until_serving(self, seconds: float = 300.0) -> None:
        """Wait until the gang serves, as its head's agent says."""
        deadline = time.monotonic() + seconds
        while not self.status().get("healthy"):
            assert time.monotonic() < deadline, json.dumps(self.status(), indent=1)
            time.sleep(0.5)

    def plan(self) -> Plan:
        """Return the plan as the command prints it."""
        done = self.ppdeploy("plan", "--json")
        assert done.code == 0, done.said
        return Plan.model_validate_json(done.out)

    def complete(self, prompt: str, *, host: str = "node1", port: int = 8000, tokens: int = 64) -> str:
        """Return the greedy completion of `prompt` that the API on a head gives."""
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        script = "import sys, urllib.request as u; print(u.urlopen(u.Request(sys.argv[1], sys.stdin.buffer.read(), "
        script += "{'Content-Type': 'application/json'}), timeout=120).read().decode())"
        url = f"http://127.0.0.1:{port}/v1/completions"
        said = self.lab.exec_ssh(host, ["python3", "-c", script, url], stdin=json.dumps(body)).stdout
        answer = json.loads(said)
        assert answer["usage"]["completion_tokens"] == tokens, answer
        return str(answer["choices"][0]["text"])

    def role(self, *roles: str, words: Sequence[str] = ()) -> Done:
        """Take facts, plan, and run these roles as site.yml runs them, on nodes and outside of them."""
        return self._books("-".join(roles), role_plays(*roles), *values_words(), *words)

    def book(self, name: str, play: Mapping[str, Any], *words: str) -> Done:
        """Run a playbook of one play."""
        return self._books(name, [play], *words)

    def _books(self, name: str, plays: Sequence[Mapping[str, Any]], *words: str) -> Done:
        command = self.book_command(name, plays, *words)
        return self._run(command, " ".join((name, *words)), cwd=data_root(), env={"PATH": search_path()})

    def book_command(self, name: str, plays: Sequence[Mapping[str, Any]], *words: str) -> list[str]:
        """Write a playbook of these plays and return the command that runs it, from the checkout."""
        path = self.elsewhere / f"{name}.yml"
        path.write_text(yaml.safe_dump([dict(play) for play in plays], sort_keys=False), encoding="utf-8")
        program = Path(sys.executable).with_name("ansible-playbook")
        return [str(program), "-i", str(self.inventory), *words, str(path)]

    def edited(self, folder: Path, change: Mapping[str, Any]) -> Path:
        """Write a copy of the inventory with other variables of the group `vllm` and return its path."""
        tree = yaml.safe_load(self.inventory.read_text(encoding="utf-8"))
        tree["vllm"]["vars"] |= change
        folder.mkdir(exist_ok=True)
        path = folder / "hosts.yml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        return path


def role_plays(*names: str) -> list[dict[str, Any]]:
    """Return site.yml's plays with these of its roles alone, for a playbook that lies anywhere."""
    books, found = data_root() / "playbooks", []
    for play in yaml.safe_load((books / "site.yml").read_text(encoding="utf-8")):
        roles = [one for one in play.get("roles", ()) if one["role"] in names]
        if roles and play["hosts"] == "vllm":
            told = [one for one in play["pre_tasks"] if "ansible.builtin.set_fact" in one]
            plan = {"name": "Take facts and plan", "ansible.builtin.import_tasks": str(books / "tasks/plan.yml")}
            found.append({**play, "pre_tasks": [plan, *told], "roles": roles})
        elif roles:
            found.append({**play, "roles": roles})
    if len(found) > 1:
        # It says which hosts the others are for.
        found.insert(0, {"ansible.builtin.import_playbook": str(books / "gateways.yml")})
    return found


def values_words() -> list[str]:
    """Return the words by which a playbook elsewhere gets the variables of playbooks/group_vars."""
    return ["-e", f"@{data_root() / 'playbooks/group_vars/all.yml'}"]


def _cases(report: Path) -> Iterable[tuple[str, str, bool]]:
    """Yield the tests of pytest's report: `file::test`, its host, and whether it failed."""
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  (pytest wrote it just now)
        test, _, parameter = case.attrib["name"].partition("[")
        failed = case.find("failure") is not None or case.find("error") is not None
        yield f"{case.attrib['classname'].rsplit('.', 1)[-1]}::{test}", parameter.rstrip("]").rpartition("/")[2], failed


def no_change(hosts: Iterable[str] = ("node1", "node2")) -> dict[str, int]:
    """Return what `Done.changed` says of a run that changed nothing."""
    return dict.fromkeys(hosts, 0)
