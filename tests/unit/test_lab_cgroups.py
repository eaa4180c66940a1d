"""The lab's control groups, on plain folders that stand in for the mounted hierarchies."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppdeploy.errors import ApplyError, BlockedError
from ppdeploy.lab.cgroups import CgroupTree, Hierarchy, parse_hierarchies
from ppdeploy.lab.host import limited_meminfo

HYBRID = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""
PURE = "30 24 0:26 / /sys/fs/c\\040group rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"


def hierarchy(folder: Path, *, v2: bool, controllers: str = "") -> Hierarchy:
    folder.mkdir()
    return Hierarchy(folder, v2, frozenset(controllers.split(",")))


def test_a_hybrid_machine_has_every_hierarchy() -> None:
    found = {str(entry.folder): (entry.v2, sorted(entry.controllers)) for entry in parse_hierarchies(HYBRID)}
    assert found == {
        "/sys/fs/cgroup/memory": (False, ["memory"]),
        "/sys/fs/cgroup/cpu,cpuacct": (False, ["cpu", "cpuacct"]),
        "/sys/fs/cgroup/systemd": (False, ["name=systemd"]),
        "/sys/fs/cgroup/unified": (True, ["nsdelegate"]),
    }


def test_a_machine_with_cgroup_v2_alone_has_one() -> None:
    (found,) = parse_hierarchies(PURE)
    assert found.v2
    assert found.folder == Path("/sys/fs/c group")


def test_a_machine_without_control_groups_is_told_so() -> None:
    with pytest.raises(BlockedError, match="no control groups are mounted"):
        CgroupTree("lab", []).create("node1")


def test_a_group_is_made_in_every_hierarchy_with_the_cpus_of_its_parent(tmp_path: Path) -> None:
    cpuset = hierarchy(tmp_path / "cpuset", v2=False, controllers="cpuset")
    memory = hierarchy(tmp_path / "memory", v2=False, controllers="memory")
    (cpuset.folder / "cpuset.cpus").write_text("0-1")
    (cpuset.folder / "cpuset.mems").write_text("0")
    tree = CgroupTree("lab", [cpuset, memory])
    tree.create("node1")
    tree.create("node1")
    assert (tmp_path / "cpuset/lab/node1/cpuset.cpus").read_text() == "0-1"
    assert tree.procs_files("node1") == [
        str(tmp_path / "cpuset/lab/node1/cgroup.procs"),
        str(tmp_path / "memory/lab/node1/cgroup.procs"),
    ]


def test_on_v2_the_groups_above_pass_their_controllers_on(tmp_path: Path) -> None:
    unified = hierarchy(tmp_path / "unified", v2=True)
    top = unified.folder / "lab"
    top.mkdir()
    for folder in (unified.folder, top):
        (folder / "cgroup.controllers").write_text("memory\n")
    CgroupTree("lab", [unified]).create("node1")
    assert (unified.folder / "cgroup.subtree_control").read_text() == "+memory"
    assert (top / "cgroup.subtree_control").read_text() == "+memory"
    # The host's own group is left to the host: systemd-nspawn and systemd divide it.
    assert list((top / "node1").iterdir()) == []


def test_processes_are_found_in_all_hierarchies_and_below_a_group(tmp_path: Path) -> None:
    one, two = hierarchy(tmp_path / "a", v2=False), hierarchy(tmp_path / "b", v2=True)
    for folder, pids in ((one.folder / "lab/node1/init.scope", "11\n"), (two.folder / "lab/node2", "12\n13\n")):
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text(pids)
    tree = CgroupTree("lab", [one, two])
    assert tree.pids() == {11, 12, 13}
    assert tree.pids("node1") == {11}
    assert tree.children() == {"node1", "node2"}


@pytest.mark.parametrize(
    ("v2", "name", "limited", "unlimited"),
    [(False, "memory.limit_in_bytes", "1024", "-1"), (True, "memory.max", "1024", "max")],
)
def test_a_memory_limit_is_written_where_the_kernel_reads_it(
    tmp_path: Path, v2: bool, name: str, limited: str, unlimited: str
) -> None:
    found = hierarchy(tmp_path / "memory", v2=v2, controllers="memory")
    file = found.folder / "lab/node1" / name
    file.parent.mkdir(parents=True)
    file.write_text("")
    tree = CgroupTree("lab", [found])
    tree.set_memory_limit("node1", 1024)
    assert file.read_text() == limited
    tree.set_memory_limit("node1", None)
    assert file.read_text() == unlimited


def test_a_refused_memory_limit_names_what_is_in_use(tmp_path: Path) -> None:
    found = hierarchy(tmp_path / "memory", v2=False, controllers="memory")
    group = found.folder / "lab/node1"
    # A folder in the file's place refuses the write, as the kernel does.
    (group / "memory.limit_in_bytes").mkdir(parents=True)
    (group / "memory.usage_in_bytes").write_text("4096\n")
    with pytest.raises(ApplyError, match=r"1024 bytes.*\(node1\).*4096 bytes"):
        CgroupTree("lab", [found]).set_memory_limit("node1", 1024)


def test_without_a_memory_controller_a_limit_is_refused(tmp_path: Path) -> None:
    tree = CgroupTree("lab", [hierarchy(tmp_path / "systemd", v2=False, controllers="name=systemd")])
    assert tree.memory_used("node1") is None
    with pytest.raises(BlockedError, match="no memory controller"):
        tree.set_memory_limit("node1", 1)


def test_a_limited_host_says_that_it_has_no_more() -> None:
    text = "MemTotal:  24000000 kB\nMemFree:  9000000 kB\nMemAvailable:  20000000 kB\nHugePages_Total:  0\n"
    seen = limited_meminfo(text, limit=4 << 30, used=1 << 30).splitlines()
    assert [line.split() for line in seen] == [
        ["MemTotal:", str(4 << 20), "kB"],
        ["MemFree:", str(3 << 20), "kB"],
        ["MemAvailable:", str(3 << 20), "kB"],
        ["HugePages_Total:", "0"],
    ]
    assert limited_meminfo(text, limit=64 << 30, used=0).splitlines()[0].split()[1] == "24000000"
