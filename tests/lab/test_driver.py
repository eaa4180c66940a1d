"""`nvidia_driver` on two hosts of its own, without a GPU: packages of the right names, made up, from a mirror.

What a host has no part of (the card, Secure Boot, nouveau) is put into the facts that it gave; all else is real: apt,
its signatures and pins, dpkg and its locks, a reboot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdeploy.facts import NodeFacts
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from ppdeploy.paths import data_root
from ppdeploy.plan.driver import BLACKLIST, PREFERENCES, SOURCES
from tests.lab.cluster import Done, no_change
from tests.lab.drivers import NEWER, PACKAGES, SMI, VERSION, Driven, gpg, told, with_card

#: Has the dpkg lock as a program that installs packages has it.
_LOCKER = """
import fcntl, sys, time
with open("/var/lib/dpkg/lock-frontend", "w") as stream:
    fcntl.lockf(stream, fcntl.LOCK_EX)
    time.sleep(float(sys.argv[1]))
"""

#: A mirror over TLS, and before it the proxy of `tests/forward_proxy.py`, which alone knows where any name leads.
_TLS = """
import functools, http.server, ssl
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="/srv")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8443), handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/srv/tls.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
_PROXY = """
import time
from pathlib import Path
connect = socket.create_connection
socket.create_connection = lambda address, *more, **options: connect(("127.0.0.1", address[1]), *more, **options)
with ForwardProxy() as proxy:
    while True:
        Path("/run/asked").write_text(" ".join(proxy.asked))
        Path("/run/proxy").write_text(proxy.address)
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """Two bare hosts with a signed mirror each, taken down at the end."""
    lab = Lab(f"{default_name()}-driver")
    folder = tmp_path_factory.mktemp("driver")
    try:
        lab.down()
        described = LabInventory.one_pipeline(2, model=str(tiny_model()), vars={"ppdeploy_device": "cuda"})
        inventory = lab.up(2, inventory=described, owner=os.getpid())
        cluster = Driven(lab, inventory, folder, [])
        for node in lab.nodes:
            mirror(cluster, node)
        yield cluster
    finally:
        lab.down()


def mirror(cluster: Driven, node: str) -> None:
    """Put a mirror of made-up packages onto a host, signed with a key that is made once, and serve it there."""
    folder = "/srv/cuda/debian12/x86_64"
    cluster.out(node, f"mkdir -p {folder}")
    cluster.lab.exec_ssh(node, ["sh", "-ec", f"cat > {folder}/smi"], stdin=SMI)
    script = PACKAGES.replace("VERSION", VERSION).replace("NEWER", NEWER)
    cluster.out(node, f"cd {folder}\n{script}")
    release = cluster.out(node, f"cat {folder}/Release") + "\n"
    signed = gpg(cluster.elsewhere, "--clearsign", stdin=release)
    cluster.lab.exec_ssh(node, ["sh", "-ec", f"cat > {folder}/InRelease"], stdin=signed)
    serve = "python3 -m http.server --bind 127.0.0.1 --directory /srv 8089"
    unit = f"[Service]\nExecStart=/usr/bin/{serve}\n[Install]\nWantedBy=multi-user.target\n"
    cluster.lab.exec_ssh(node, ["sh", "-ec", "cat > /etc/systemd/system/mirror.service"], stdin=unit)
    cluster.out(node, "systemctl enable --now mirror.service")


def lock(cluster: Driven, seconds: int) -> None:
    """Let a unit on node1 install packages, as far as dpkg's lock tells, and return once it does."""
    cluster.out("node1", f"systemd-run --quiet --unit=unattended --collect python3 -c '{_LOCKER}' {seconds}")
    has = 'grep -q ":$(stat -c %i /var/lib/dpkg/lock-frontend) " /proc/locks'
    cluster.out("node1", f"for try in $(seq 200); do {has} && exit 0; sleep 0.1; done; exit 1")


@pytest.fixture(scope="module")
def bare(driven: Driven) -> dict[str, NodeFacts]:
    """What the hosts say of themselves before anything is installed."""
    return driven.facts()


def test_the_play_itself_says_that_there_is_no_card(driven: Driven, bare: dict[str, NodeFacts]) -> None:
    before = driven.state()
    done = driven.ansible_playbook()
    assert done.code != 0
    assert "there is no NVIDIA card on its PCI bus (node1): put one in, or set ppdeploy_device: cpu" in told(done)
    assert "(node2)" in told(done)
    assert done.changed() == no_change()
    assert driven.state() == before
    assert {one.driver.manager for one in bare.values() if one.driver} == {"apt"}


def test_a_check_shows_the_files_and_changes_nothing(driven: Driven, bare: dict[str, NodeFacts]) -> None:
    before = driven.state()
    decided = driven.decide(with_card(bare))
    assert decided["blocked"] == [], decided
    done = driven.drive(decided, "--check", "--diff")
    assert done.code == 0, done.said
    for line in ("+blacklist nouveau", "+Pin: version 580.*", "+URIs: http://127.0.0.1:8089/cuda/debian12/x86_64"):
        assert f"\n{line}\n" in done.out, line
    assert min(done.changed().values()) > 0
    assert driven.state() == before


def test_no_host_is_touched_when_one_of_them_is_blocked(driven: Driven, bare: dict[str, NodeFacts]) -> None:
    before = driven.state()
    decided = driven.decide(with_card(bare, node2={"secure_boot": True}))
    done = driven.drive(decided)
    assert done.code != 0
    assert "Secure Boot is on" in told(done)
    assert "mokutil --import /var/lib/dkms/mok.pub" in told(done)
    assert done.changed() == no_change()
    assert driven.state() == before


def test_who_installs_packages_is_waited_for_and_named(driven: Driven, bare: dict[str, NodeFacts]) -> None:
    before = driven.state()
    lock(driven, 600)
    facts = driven.facts()["node1"].driver
    assert facts is not None
    assert facts.lock is not None
    assert (facts.lock.process, facts.lock.unit) == ("python3", "unattended.service")
    done = driven.drive(driven.decide(with_card(bare), package_lock_timeout=2))
    assert done.code != 0
    said = f"python3 (pid {facts.lock.pid}, unattended.service) has been installing packages for 2 s and goes on"
    assert said in told(done), done.said
    assert done.changed() == no_change()
    assert driven.state() == before
    driven.out("node1", "systemctl stop unattended.service")


@pytest.fixture(scope="module")
def brought(driven: Driven, bare: dict[str, NodeFacts]) -> Done:
    """The driver is brought to node1 as it is, and to node2, of which the facts say that nouveau has its card."""
    # Somebody installs packages on one host when it begins, and ends a little later.
    lock(driven, 8)
    decided = driven.decide(with_card(bare, node2={"loaded": ("nouveau",)}), allow_reboot=True)
    assert [decided["nodes"][node]["reboot"] for node in ("node1", "node2")] == [False, True]
    done = driven.drive(decided)
    assert done.code == 0, done.said
    return done


@pytest.mark.usefixtures("brought")
def test_the_wanted_branch_is_there_and_stays_there(driven: Driven) -> None:
    show = "dpkg-query --show --showformat='${Package}=${Version} ' nvidia-open nvidia-driver-cuda libcuda1"
    wanted = " ".join(f"{name}={VERSION}" for name in ("libcuda1", "nvidia-driver-cuda", "nvidia-open"))
    for node in driven.lab.nodes:
        assert driven.out(node, show) == wanted
        assert driven.out(node, "apt-mark showhold").split() == ["libcuda1", "nvidia-driver-cuda", "nvidia-open"]
    # As unattended-upgrades would: the newer branch lies in the mirror, and nothing takes it.
    driven.out("node1", "apt-get -y update && apt-get -y dist-upgrade")
    assert driven.out("node1", show) == wanted
    policy = driven.out("node1", "apt-mark unhold libcuda1 > /dev/null; apt-cache policy libcuda1")
    assert f"Candidate: {VERSION}" in policy, "the pin alone keeps the branch, too"
    driven.out("node1", "apt-mark hold libcuda1")


def test_only_the_host_whose_driver_takes_that_was_rebooted(
    driven: Driven, bare: dict[str, NodeFacts], brought: Done
) -> None:
    assert min(brought.changed().values()) > 0
    boots = {node: driven.out(node, "cat /proc/sys/kernel/random/boot_id") for node in driven.lab.nodes}
    assert boots["node1"] == bare["node1"].identity.boot_id
    assert boots["node2"] != bare["node2"].identity.boot_id


@pytest.mark.usefixtures("brought")
def test_a_second_run_has_nothing_to_do_and_asks_nothing(driven: Driven) -> None:
    decided = driven.decide(driven.facts())
    assert {node["action"] for node in decided["nodes"].values()} == {"keep"}
    assert (decided["work"], decided["blocked"], decided["lines"]) == (False, [], [])
    done = driven.drive(decided)
    assert (done.code, done.changed()) == (0, no_change()), done.said
    # Nothing but what the controller asserts by itself is ever asked.
    assert "ok: [node1]" not in done.out.split("nvidia_driver", 1)[-1], done.said


@pytest.mark.usefixtures("brought")
def test_a_hold_that_was_taken_off_and_a_file_that_was_removed_come_back(driven: Driven) -> None:
    driven.out("node1", "apt-mark unhold nvidia-open")
    driven.out("node2", f"rm {PREFERENCES}")
    decided = driven.decide(driven.facts())
    assert [decided["nodes"][node]["action"] for node in ("node1", "node2")] == ["settle", "settle"]
    done = driven.drive(decided)
    assert done.code == 0, done.said
    assert "nvidia-open" in driven.out("node1", "apt-mark showhold")
    assert "Pin: version 580.*" in driven.out("node2", f"cat {PREFERENCES}")
    driven.out("node2", f"ls {BLACKLIST} {SOURCES}")
    assert driven.decide(driven.facts())["work"] is False


@pytest.mark.usefixtures("brought")
def test_a_driver_that_was_half_installed_is_finished(driven: Driven) -> None:
    driven.out("node1", f"cd /srv/cuda/debian12/x86_64 && dpkg --unpack nvidia-open_{VERSION}.deb")
    driven.out("node1", "mv /usr/bin/nvidia-smi /usr/bin/nvidia-smi.off")
    facts = with_card(driven.facts())
    (broken,) = facts["node1"].driver.broken if facts["node1"].driver else ()
    assert (broken.name, broken.state) == ("nvidia-open", "unpacked")
    driven.out("node1", "mv /usr/bin/nvidia-smi.off /usr/bin/nvidia-smi")
    decided = driven.decide(facts)
    assert (decided["nodes"]["node1"]["finish"], decided["nodes"]["node2"]["needed"]) == (True, False)
    done = driven.drive(decided)
    assert done.code == 0, done.said
    assert done.changed()["node2"] == 0
    assert (
        driven.out("node1", "dpkg --audit; dpkg-query --show --showformat='${db:Status-Status}' nvidia-open")
        == "installed"
    )


@pytest.mark.usefixtures("brought")
def test_a_mirror_that_another_key_signed_is_not_believed(driven: Driven, bare: dict[str, NodeFacts]) -> None:
    other = driven.elsewhere / "other"
    other.mkdir()
    gpg(other, "--list-keys")
    shutil.copy(driven.elsewhere / "mirror.asc", driven.elsewhere / "right.asc")
    shutil.copy(other / "mirror.asc", driven.elsewhere / "mirror.asc")
    before = driven.out("node1", "dpkg-query -W")
    done = driven.drive(driven.decide(with_card(bare)))
    shutil.copy(driven.elsewhere / "right.asc", driven.elsewhere / "mirror.asc")
    assert done.code != 0
    assert "apt cannot read http://127.0.0.1:8089/cuda/debian12/x86_64" in told(done), done.said
    assert "NO_PUBKEY" in told(done), done.said
    assert driven.out("node1", "dpkg-query -W") == before


@pytest.fixture
def beyond(driven: Driven) -> Iterator[dict[str, str]]:
    """The mirror as one beyond a company's proxy, with a certificate of the company's own; the proxies' addresses."""
    tls = driven.elsewhere / "tls.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=mirror.example"),
            *("-addext", "subjectAltName=DNS:mirror.example", "-keyout", f"{tls}.key", "-out", f"{tls}.crt"),
        ],
        check=True,
        capture_output=True,
    )
    certificate = Path(f"{tls}.crt").read_text(encoding="utf-8")
    proxy = (data_root() / "tests" / "forward_proxy.py").read_text(encoding="utf-8") + _PROXY
    files = {
        "/srv/ca.pem": certificate,
        "/srv/tls.pem": Path(f"{tls}.key").read_text(encoding="utf-8") + certificate,
        "/srv/tls.py": _TLS,
        "/srv/proxy.py": proxy,
    }
    found = {}
    for node in driven.lab.nodes:
        for path, text in files.items():
            driven.lab.exec_ssh(node, ["sh", "-ec", f"cat > {path}"], stdin=text)
        for unit in ("tls", "proxy"):
            driven.out(node, f"systemd-run --quiet --collect --unit=lab-{unit} python3 /srv/{unit}.py")
        driven.out(node, "for try in $(seq 100); do test -s /run/proxy && exit 0; sleep 0.1; done; exit 1")
        found[node] = driven.out(node, "cat /run/proxy")
    yield found
    for node in driven.lab.nodes:
        driven.out(node, "systemctl stop lab-tls lab-proxy")


@pytest.mark.usefixtures("brought")
def test_the_sites_proxy_and_certificates_hold_for_keyring_and_packages(
    driven: Driven, bare: dict[str, NodeFacts], beyond: dict[str, str]
) -> None:
    """The mirror's name is known to the proxy alone, and its certificate to the file that the inventory names."""
    base, folder = "https://mirror.example:8443/cuda", "debian12/x86_64"
    # Any package: NVIDIA's own keyring is not to be had here, and a mirror takes none.
    package = f"{folder}/nvidia-container-toolkit_1.18.0.deb"
    assert driven.out("node1", "dpkg-query --show nvidia-container-toolkit 2>&1 || true").startswith("dpkg-query: no")

    def drive(certificates: str) -> Done:
        wants = {"proxy": "http://proxy.example:3128", "no_proxy": ["other.example"], "ca_bundle": certificates}
        decided = driven.decide(with_card(bare), nvidia_repository=base, **wants)
        for node, address in beyond.items():
            sha256 = driven.out(node, f"sha256sum /srv/cuda/{package}").split()[0]
            own = decided["nodes"][node]
            assert (own["proxy"], own["no_proxy"], own["ca_bundle"]) == tuple(wants.values())
            own |= {"proxy": address, "keyring": {"url": f"{base}/{package}", "sha256": sha256}}
        return driven.drive(decided)

    refused = drive("/srv/absent.pem")
    assert refused.code != 0
    assert "the certificates are to be in /srv/absent.pem, which is no file (node1): put them there" in told(refused)
    assert refused.changed() == no_change()
    done = drive("/srv/ca.pem")
    assert done.code == 0, done.said
    for node in beyond:
        assert driven.out(node, "dpkg-query --show --showformat='${Version}' nvidia-container-toolkit") == "1.18.0"
        assert base in driven.out(node, "apt-cache policy libcuda1")
        assert set(driven.out(node, "sleep 0.3; cat /run/asked").split()) == {"CONNECT", "mirror.example:8443"}
        assert driven.out(node, "ls /run/ppdeploy-nvidia-apt.conf 2>/dev/null || echo none") == "none"


@pytest.mark.usefixtures("brought")
def test_a_branch_that_is_asked_for_later_upgrades_what_is_held(driven: Driven) -> None:
    """Last, since both hosts are on another branch after it."""
    for node in driven.lab.nodes:
        driven.out(node, "apt-mark hold nvidia-open nvidia-driver-cuda libcuda1")
    decided = driven.decide(with_card(driven.facts()), nvidia_branch=610)
    assert {node["action"] for node in decided["nodes"].values()} == {"install"}, decided
    done = driven.drive(decided)
    assert done.code == 0, done.said
    show = "dpkg-query --show --showformat='${Version} ' nvidia-open nvidia-driver-cuda libcuda1"
    for node in driven.lab.nodes:
        assert driven.out(node, show).split() == [NEWER] * 3
        assert driven.out(node, "apt-mark showhold").split() == ["libcuda1", "nvidia-driver-cuda", "nvidia-open"]
