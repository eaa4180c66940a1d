"""What a bundle lacks for the nodes of a pipeline, as far as facts show it before there is a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppdeploy.bundle.content import MANIFEST, Bundle, open_bundle, read_bundle
from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import NodeFacts
from ppdeploy.locks import Lock
from ppdeploy.plan.environment import (
    OF_TUNNELS,
    choose_lock,
    lacking,
    minors,
    packages_from,
    packages_of_roles,
    system_packages,
)
from ppdeploy.plan.types import SystemPackage
from ppdeploy.spec import PipelineSpec


def environment_problems(spec: PipelineSpec, facts: Mapping[str, NodeFacts]) -> list[str]:
    """Return, in sentences, why the nodes of a pipeline would get no environment.

    No lock is for them, or their bundle has not that lock, or not a package that a node's facts show to be lacking. Of
    a bundle on the nodes, it is what its manifest on the controller says, where that is there. Nothing is said of
    nodes without facts.
    """
    if not all(host.name in facts for host in spec.hosts):
        return []
    try:
        lock = choose_lock(spec, facts)
        bundle = _bundle(spec)
    except (InputError, BlockedError) as error:
        return [str(error)]
    return list(_lacking(spec, facts, lock, bundle)) if bundle is not None else []


def _bundle(spec: PipelineSpec) -> Bundle | None:
    """Return the bundle of a pipeline; None where it has none, or none that can be read here. Raises InputError."""
    folder = spec.wheelhouse_path
    if folder is None:
        return None
    if not spec.vars.wheelhouse_on_nodes:
        return open_bundle(folder)
    return read_bundle(folder) if (folder / MANIFEST).is_file() else None


def _lacking(spec: PipelineSpec, facts: Mapping[str, NodeFacts], lock: Lock, bundle: Bundle) -> Iterator[str]:
    building = [host.name for host in spec.hosts if not _is_built(facts[host.name], lock)]
    if building:
        try:
            bundle.lock(lock.digest)
        except InputError as error:
            yield str(error)
    if packages_from(spec.vars) != "bundle":
        return
    for host in (one.name for one in spec.hosts):
        own = facts[host]
        pythons = pythons_lacking(lock, own) if host in building else ()
        names = [one.package for one in (*pythons, *_programs(spec, host, own))]
        try:
            bundle.require_packages(own.os.release, own.os.machine, host, names)
        except InputError as error:
            yield str(error)


def _is_built(facts: NodeFacts, lock: Lock) -> bool:
    return any(venv.name == lock.directory_name and venv.marker is not None for venv in facts.venvs)


def _programs(spec: PipelineSpec, host: str, facts: NodeFacts) -> tuple[SystemPackage, ...]:
    """Return the packages that other roles than vllm_install take from the bundle for a node."""
    wants = spec.vars
    roles = {"model_store", *(["firewall"] if wants.firewall != "none" else [])}
    if wants.gateway and host == spec.hosts[0].name:
        roles.add("gateway")
    tunnel = OF_TUNNELS.get(wants.fabric_encryption, ()) if len(spec.hosts) > 1 else ()
    return (*packages_of_roles(roles, facts.tools), *lacking(tunnel, facts.tools))


def pythons_lacking(lock: Lock, facts: NodeFacts) -> tuple[SystemPackage, ...]:
    """Return the package of the Python that a lock needs, where a node's facts show none."""
    if lock.python in minors(facts):
        return ()
    return tuple(one for one in system_packages(facts.os, lock.python, lock.device) if one.kind == "python")
