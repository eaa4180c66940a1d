"""The typed spec: what one inventory asks for, checked, without secrets and without facts of any host."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import Field

from ppdeploy.spec.variables import Frozen, HostVars, PipelineVars, is_local_model


class HostSpec(Frozen):
    """One host of a pipeline, at its place in rank order."""

    name: str
    """Its name in the inventory."""
    address: str
    """Where Ansible reaches it (`ansible_host`, else its name): management, not the fabric."""
    vars: HostVars


class BundledDriver(Frozen):
    """The NVIDIA driver that a bundle has, as its manifest names it."""

    system: str = Field(description="of the nodes that it is for, such as debian 12")
    machine: str
    manager: Literal["apt", "dnf"]
    source: Literal["nvidia", "distribution"] = Field(description="as ppdeploy_nvidia_driver names it")
    branch: int
    kernels: tuple[str, ...] = Field(description="those that it has headers, or modules, for")
    names: tuple[str, ...] = Field(description="what was asked for; the folder has what these need, too")

    def is_like(self, other: BundledDriver) -> bool:
        """Return whether both are of one source and branch, for one system; their kernels may differ."""
        alone = {"kernels": (), "names": ()}
        return self.model_copy(update=alone) == other.model_copy(update=alone)

    def serves(self, needed: BundledDriver) -> bool:
        """Return whether it is the one that is needed, for all kernels of that."""
        return self.is_like(needed) and set(needed.kernels) <= set(self.kernels)


class Wheelhouse(Frozen):
    """What the bundle in `ppdeploy_wheelhouse` says of itself, as far as a plan follows from it."""

    driver: BundledDriver | None = None
    system: str = ""
    """Release of the nodes that its system packages are for, such as debian 12; empty: it has none."""
    machine: str = ""
    """Architecture of these nodes."""
    packages: tuple[str, ...] = ()
    """Names of the system packages."""
    driver_bytes: int = 0
    """Size of the driver's packages, as they are in the folder."""
    problem: str = ""
    """Why it cannot be read; empty where it can, and where nothing of it is asked."""

    def brings(self, package: str, system: str, machine: str) -> bool:
        """Return whether it has a system package for nodes of a release; what cannot be read may have it."""
        return bool(self.problem) or ((self.system, self.machine) == (system, machine) and package in self.packages)


class PipelineSpec(Frozen):
    """One model to be served by one group of hosts."""

    name: str
    """The inventory group's name."""
    hosts: tuple[HostSpec, ...]
    """In rank order, which is the order in the inventory; the first is the head."""
    vars: PipelineVars
    has_hf_token: bool
    """Whether a Hugging Face token is given; the token itself is never here."""
    pending: tuple[str, ...] = ()
    """Variables whose values are templates that only a play can render; their fields hold no real value."""
    model_path: Path | None
    """The model's folder on the controller, absolute; None for a Hugging Face id (or a pending one)."""
    wheelhouse_path: Path | None
    """The wheelhouse's folder on the controller, absolute; None without one."""
    wheelhouse: Wheelhouse = Wheelhouse()
    """What that folder has; it is read by `ppdeploy.play`, since the spec itself opens no file."""
    nvidia_key_path: Path | None = None
    """The file on the controller with the key of a mirror of NVIDIA's repositories; None without one."""

    @property
    def model_is_local(self) -> bool:
        """Whether the model is a folder on the controller rather than a Hugging Face repository."""
        return is_local_model(self.vars.model)


class GatewayHost(Frozen):
    """A host of the group `gateway`: it has a gateway, whether or not it is the head of a pipeline."""

    name: str
    """Its name in the inventory."""
    address: str
    """Where Ansible reaches it (`ansible_host`, else its name)."""


class Spec(Frozen):
    """All that the inventory of one cluster asks for."""

    cluster: str
    """The inventory folder's name."""
    inventory_dir: Path
    """The inventory's folder, absolute: relative paths of the inventory start here."""
    pipelines: tuple[PipelineSpec, ...]
    """In the order of the inventory."""
    gateways: tuple[GatewayHost, ...] = ()
    """The hosts of the group `gateway`; heads have a gateway without it."""

    @property
    def outside(self) -> tuple[GatewayHost, ...]:
        """The hosts of the group `gateway` that are in no pipeline."""
        members = {host.name for pipeline in self.pipelines for host in pipeline.hosts}
        return tuple(host for host in self.gateways if host.name not in members)

    def only(self, names: Collection[str]) -> Spec:
        """Return the spec with these pipelines alone; what is a host of the others is no gateway in it either."""
        kept = tuple(pipeline for pipeline in self.pipelines if pipeline.name in names)
        gone = {host.name for pipeline in self.pipelines if pipeline.name not in names for host in pipeline.hosts}
        gateways = tuple(host for host in self.gateways if host.name not in gone)
        return self.model_copy(update={"pipelines": kept, "gateways": gateways})

    def pipeline(self, name: str) -> PipelineSpec:
        """Return the pipeline of that name (KeyError if there is none)."""
        for pipeline in self.pipelines:
            if pipeline.name == name:
                return pipeline
        raise KeyError(name)
