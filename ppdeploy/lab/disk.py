"""What makes each host itself, written into its own layer before its first boot: name, keys, addresses."""

from __future__ import annotations

from pathlib import Path

from ppdeploy.lab import network, system


def etc_hosts(name: str) -> str:
    """Return /etc/hosts as Debian's installer leaves it: the host's name is 127.0.1.1 (the trap).

    No peer is named: whoever needs a peer's address must be told it.
    """
    return f"127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost ip6-localhost ip6-loopback\n"


def networkd_files(index: int) -> dict[str, str]:
    """Return the networkd files of host `index`: static addresses, default route on host0 only."""
    host0 = (
        f"[Match]\nName=host0\n\n[Network]\nAddress={network.management_address(index)}/24\n"
        f"Gateway={network.GATEWAY}\nLinkLocalAddressing=ipv6\nIPv6AcceptRA=no\n"
    )
    fab0 = (
        # A host whose fabric is cut has to boot all the same.
        "[Match]\nName=fab0\n\n[Link]\nRequiredForOnline=no\n\n"
        f"[Network]\nAddress={network.fabric_address(index)}/24\n"
        "LinkLocalAddressing=ipv6\nIPv6AcceptRA=no\n"
    )
    # Before systemd's own 80-container-host0.network, which would ask for an address by DHCP.
    return {"etc/systemd/network/10-host0.network": host0, "etc/systemd/network/10-fab0.network": fab0}


def make_key(path: Path, comment: str) -> str:
    """Make an ed25519 key pair at `path` without a passphrase and return its public half (type and key)."""
    system.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)],
        what="making an ssh key",
    )
    return " ".join(path.with_suffix(".pub").read_text(encoding="ascii").split()[:2])


def mount_store(folder: Path, gib: int) -> None:
    """Mount what holds all that a host writes: memory, at most `gib` GiB, freed again when it is unmounted.

    Memory, since 60,000 links of a virtual environment take 2 s there and up to 100 s on a disk; and of one
    size, so that a host can run out of disk without this machine doing so. It must outlive the host's
    processes: a power cut leaves the disk as it is.
    """
    what = f"mounting a disk of {gib} GiB"
    system.run(["mount", "-t", "tmpfs", "-o", f"size={gib}g,mode=0755", "ppdeploy-lab", str(folder)], what=what)


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def prepare(layer: Path, index: int, name: str, authorized_key: str) -> str:
    """Fill the empty `layer` of host `index` and return its public host key.

    The host key is made here, before the first boot, so that host key checking can stay on from the first
    connection.
    """
    layer.mkdir(mode=0o755, parents=True)
    files = {
        "etc/hostname": f"{name}\n",
        "etc/hosts": etc_hosts(name),
        # Empty: systemd then makes one at boot and writes it here, as on a cloned machine.
        "etc/machine-id": "",
        **networkd_files(index),
    }
    for path, text in files.items():
        _write(layer / path, text)
    _write(layer / "root/.ssh/authorized_keys", f"{authorized_key} ppdeploy-lab\n", 0o600)
    (layer / "root").chmod(0o700)
    (layer / "root/.ssh").chmod(0o700)
    (layer / "etc/ssh").mkdir(mode=0o755)
    return make_key(layer / "etc/ssh/ssh_host_ed25519_key", name)
