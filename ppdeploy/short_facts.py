"""Facts written by hand: a few words for each host become the facts that a healthy host of that kind would report.

    node1: {gpus: ["RTX 4090"], fabric: 1g}
    node2: {gpus: ["RTX 4090", "RTX 4090"], fabric: 10g, memory_gib: 128}

What the words do not say is assumed (`ASSUMED`), and the plan names the hosts whose facts were made so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppdeploy.errors import InputError
from ppdeploy.facts import (
    SCHEMA_VERSION,
    Clock,
    Cpu,
    Gpu,
    Identity,
    Memory,
    Nic,
    NicAddress,
    NodeFacts,
    NvidiaDriver,
    OperatingSystem,
    PathSpace,
    Python,
    Sysctl,
    Tunnelling,
    User,
    load_facts,
)
from ppdeploy.plan.gpus import MIB, cards, nearest_card
from ppdeploy.spec import Spec
from ppdeploy.spec.plain import shown

ASSUMED = (
    "Debian 12 on x86-64, run as root, with Python 3.11, rsync and systemd",
    "NVIDIA driver 580 with CUDA 13, idle GPUs, nothing listening on our ports",
    "a kernel with WireGuard, for ppdeploy_fabric_encryption",
    "1 TiB free on the disk, 64 GiB of memory unless said",
    "one NIC on one subnet that all hosts share; 1 Gbit/s unless said",
)
"""What short facts take for granted; docs/plan.md repeats it."""

DRIVER = "580.95.05"
NIC = "fabric0"
SUBNET = IPv4Network("198.18.0.0/15")
"""Addresses where the inventory names no subnet: the block for benchmarks (RFC 2544), which no LAN routes."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(g|gbe|gbit|gbit/s|m|mbit|mbit/s)", re.IGNORECASE)
_SIZED = re.compile(r"(?P<name>.+?)\s+(?P<size>\d+(?:\.\d+)?)\s*Gi?B", re.IGNORECASE)
SAME_SIZE = 0.08
"""How far a card's memory may be from the size in its name, as a share: L40S has 45 of 48 GiB."""

MIB_LEAST, MIB_MOST = 1024, 10 * 1024 * 1024
"""The memory that a GPU may be said to have, in MiB."""

_SHARED = ("GB10", "Orin (nvgpu)", "Thor")


class ShortFacts(BaseModel):
    """What is said of one host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: tuple[str, ...] = Field(default=(), description="name of each GPU, with its GiB where the name has several")
    fabric: str | None = Field(default="1g", description="rate of the NIC: 1g, 2.5g, 10g, 25g, 100g; null: not known")
    memory_gib: float = Field(default=64, gt=0, le=1e5)
    cores: int = Field(default=16, ge=1, le=4096)
    machine: Literal["x86_64", "aarch64"] = "x86_64"


FIELDS = {
    "gpus": "a list of names",
    "fabric": "a rate such as 1g, or null",
    "memory_gib": "a number above 0",
    "cores": "a whole number from 1",
    "machine": "x86_64 or aarch64",
}
"""What each field of ShortFacts must be."""

_WRITE_ONE = "name a file that `ppdeploy plan --save-facts FILE` wrote, or one written by hand (docs/plan.md)"


def rate_mbit(text: str, where: str) -> int:
    """Return a rate such as `1g`, `2.5g`, `10 Gbit/s` or `100m` in Mbit/s; InputError for anything else."""
    found = _RATE.fullmatch(text.strip())
    rate = round(float(found[1]) * (1000 if found[2].lower().startswith("g") else 1)) if found else 0
    if not 1 <= rate <= 10_000_000:
        raise InputError(f"{text!r} is no rate of a link", where=where, remedy="write it as 1g, 2.5g, 10g, 25g or 100g")
    return rate


def read_facts(path: Path, spec: Spec) -> tuple[dict[str, NodeFacts], tuple[str, ...]]:
    """Read a facts file, saved or written by hand; return the facts, and the hosts whose facts are assumed.

    `spec` has the hosts and what the inventory says of their fabric. Raises InputError naming file and host.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except OSError as error:
        what = f"the facts file cannot be read: {error.strerror}"
        raise InputError(what, where=str(path), remedy=_WRITE_ONE) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(
            f"the facts file is neither YAML nor JSON{f' (line {mark.line + 1})' if mark else ''}",
            where=str(path),
            remedy=_WRITE_ONE,
        ) from error
    if not isinstance(document, dict):
        raise InputError("the facts file holds no hosts by name", where=str(path), remedy=_WRITE_ONE)
    if "kind" in document or "schema_version" in document:
        return load_facts(path), ()
    return expand(_short(document, path), spec), tuple(str(host) for host in document)


def _short(document: Mapping[Any, Any], path: Path) -> dict[str, ShortFacts]:
    found = {}
    for host, values in document.items():
        try:
            found[str(host)] = ShortFacts.model_validate(values)
        except ValidationError as error:
            raise InputError(
                _wrong(error.errors(include_url=False)[0]["loc"], values),
                where=f"{path}, host {host}",
                remedy='write {gpus: ["RTX 4090"], fabric: 1g, memory_gib: 64}',
            ) from error
    if not found:
        raise InputError("the facts file names no host", where=str(path), remedy="see docs/plan.md for an example")
    return found


def _wrong(place: Sequence[int | str], values: Any) -> str:
    """Return what is wrong with what is said of a host; `place` leads to it."""
    if not place:
        return f"what is said of the host is {shown(values)}, not a map"
    field = str(place[0])
    if field not in FIELDS:
        return f"{shown(field)} is none of the fields {', '.join(FIELDS)}"
    return f"{field} is {shown(values[field])}, not {FIELDS[field]}"


def expand(short: Mapping[str, ShortFacts], spec: Spec) -> dict[str, NodeFacts]:
    """Return full facts for what was said of each host. Raises InputError for a GPU or a rate that nobody knows."""
    wishes = {
        host.name: (host.vars.fabric_interface, pipeline.vars.fabric_subnet, pipeline.vars.models_dir)
        for pipeline in spec.pipelines
        for host in pipeline.hosts
    }
    found = {}
    for number, (host, said) in enumerate(short.items(), start=1):
        interface, subnet, models = wishes.get(host, (None, None, "/var/lib/ppdeploy/models"))
        network = IPv4Network(str(subnet)) if subnet else SUBNET
        if number > network.num_addresses - 2:
            raise InputError(
                f"there are more hosts than addresses in {network}",
                where=f"host {host}, ppdeploy_fabric_subnet",
                remedy="leave the variable out, or name a larger subnet",
            )
        rate = None if said.fabric is None else rate_mbit(said.fabric, f"host {host}, fabric")
        nic = make_nic(interface or NIC, str(network[number]), network.prefixlen, rate)
        gpus = tuple(make_gpu(index, name, f"host {host}, gpus") for index, name in enumerate(said.gpus))
        found[host] = make_facts(host, number, said, nic, gpus, models)
    return found


def make_gpu(index: int, text: str, where: str) -> Gpu:
    """Return an idle GPU of a name such as `RTX 4090`, `A100 40 GiB`; InputError for one that is not in the table."""
    sized = _SIZED.fullmatch(text.strip())
    name = sized["name"] if sized else text.strip()
    asked = round(float(sized["size"]) * 1024) if sized else 0
    if sized and not MIB_LEAST <= asked <= MIB_MOST:
        raise InputError(
            f"the GPU {text!r} has {sized['size']} GiB of memory",
            where=where,
            remedy=f"write what it has, as in '{name} 24 GiB'",
        )
    rows = cards(name)
    if not rows and not asked:
        near = nearest_card(name)
        raise InputError(
            f"the GPU {text!r} is not in ppdeploy's table",
            where=where,
            remedy=(f"write {near}; or, where it is another card, " if near else "")
            + f"write its memory behind it, as in '{text} 24 GiB', and set ppdeploy_gpu_bandwidth_gbs and "
            "ppdeploy_gpu_bf16_tflops in the inventory",
        )
    memory = asked
    if rows:
        # A card of 24 GiB reports a few MiB less: where the size is about the card's, the card's own is meant.
        row = min(rows, key=lambda row: abs(row.memory_bytes - asked * MIB)) if asked else rows[0]
        nearest = row.memory_bytes // MIB
        memory = nearest if not asked or abs(nearest - asked) <= SAME_SIZE * asked else asked
        name = row.name
    capability = rows[0].capability if rows else None
    return Gpu(
        index=index,
        uuid=f"GPU-00000000-0000-4000-8000-{index:012x}",
        name=name,
        memory_total_mib=memory,
        memory_shared=name in _SHARED,
        memory_used_mib=0,
        driver_version=DRIVER,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        pci_address=None,
        pcie_gen_current=None,
        pcie_gen_max=None,
        pcie_width_current=None,
        pcie_width_max=None,
        ecc_enabled=None,
        ecc_uncorrected=None,
        persistence_mode=None,
        mig_enabled=None,
        processes=(),
    )


def make_nic(name: str, address: str, prefix: int, speed_mbit: int | None) -> Nic:
    """Return a wired NIC that is up, with one address."""
    return Nic(
        name=name,
        index=2,
        mac=None,
        addresses=(NicAddress(address=address, prefix=prefix, scope="global"),),
        mtu=1500,
        operstate="up",
        carrier=True,
        speed_mbit=speed_mbit,
        duplex="full",
        driver=None,
        kind="ethernet",
        virtual=False,
        wireless=False,
        usb=False,
        master=None,
        parent=None,
        counters=None,
    )


def make_facts(host: str, number: int, said: ShortFacts, nic: Nic, gpus: Sequence[Gpu], models_dir: str) -> NodeFacts:
    """Return the facts of a healthy host with this NIC and these GPUs."""
    total = int(said.memory_gib * 1024**3)
    return NodeFacts(
        schema_version=SCHEMA_VERSION,
        elapsed_s=0.0,
        problems=(),
        clock=Clock(node_time=0.0, controller_time=None, offset_s=None),
        identity=Identity(hostname=host, addresses=None, machine_id=f"{number:032x}", boot_id=None),
        user=User(name="root", uid=0, login=None),
        os=OperatingSystem(
            id="debian",
            id_like=(),
            version_id="12",
            pretty_name="Debian GNU/Linux 12 (bookworm), assumed",
            kernel="6.1.0",
            machine=said.machine,
            glibc="2.36",
            systemd_version=252,
            system_state="running",
            selinux="disabled",
            apparmor="enabled",
        ),
        cpu=Cpu(
            model=None,
            logical=said.cores,
            usable=said.cores,
            usable_list=f"0-{said.cores - 1}",
            cores=said.cores,
            sockets=1,
            flags=("avx2", "avx512f") if said.machine == "x86_64" else ("asimd",),
            numa=(),
        ),
        memory=Memory(total_bytes=total, available_bytes=total, swap_total_bytes=0, swap_free_bytes=0),
        gpus=tuple(gpus),
        nvidia_driver=NvidiaDriver(version=DRIVER, cuda_version="13.0", module_version=DRIVER) if gpus else None,
        pci_accelerators=(),
        nics=(nic,),
        default_routes=(),
        peer_routes=(),
        rdma_devices=(),
        verbs_library=None,
        sysctl=Sysctl(ip_local_port_range=(32768, 60999), ip_local_reserved_ports=None),
        pythons=(Python(path="/usr/bin/python3.11", version="3.11.2"),),
        tools={name: f"/usr/bin/{name}" for name in ("rsync", "ip", "wg", "wireguard-go")},
        rsync_version="3.2.7",
        disks=tuple(
            PathSpace(path=path, measured_at="/", mount_device=1, total_bytes=2**41, free_bytes=2**40)
            for path in ("/opt/ppdeploy", models_dir)
        ),
        listeners=(),
        pipelines={},
        files={},
        venvs=(),
        models=(),
        tunnel=Tunnelling(kernel=True, tun=True, public_key=None),
    )
