"""The cluster's CA and its certificates: made once, good for the planned names, renewed in time, checked by OpenSSL."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ppdeploy.certificates import (
    CA_LIFE,
    LEAF_LIFE,
    RENEW_BEFORE,
    ca_file,
    ca_warning,
    certificate_file,
    ensure_ca,
    ensure_leaf,
    peer_file,
)
from ppdeploy.errors import InputError

NOW = datetime.now(UTC)
NAMES = ["gpu-1.example", "192.0.2.11", "localhost"]


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Return the version that both sides agree on; raises what the client raises."""
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(here, server_side=True) as secure:
                secure.sendall(b"x")
        except OSError:
            here.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(there, server_hostname=name) as secure:
            # With TLS 1.3 a server refuses a client's certificate after the handshake.
            assert secure.recv(1) == b"x"
            return str(secure.version())
    finally:
        there.close()
        thread.join()


def server_of(path: Path, *, ca: Path | None = None) -> ssl.SSLContext:
    """Return a server with a certificate, which asks clients for one where `ca` is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    if ca:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def made(folder: Path) -> Path:
    """Make CA and certificates of one head and return the CA's."""
    assert ensure_ca(folder, "lab", NOW)
    assert ensure_leaf(folder, certificate_file(folder, "node1"), "node1", NAMES, NOW)
    assert ensure_leaf(
        folder, peer_file(folder, "node1"), "one.ppdeploy.internal", ["one.ppdeploy.internal"], NOW, client=True
    )
    return ca_file(folder)


def test_a_client_that_trusts_the_ca_believes_every_planned_name_and_no_other(tmp_path: Path) -> None:
    client = ssl.create_default_context(cafile=str(made(tmp_path)))
    server = server_of(certificate_file(tmp_path, "node1"))
    for name in NAMES:
        assert handshake(server, client, name) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match=r"192\.0\.2\.12"):
        handshake(server, client, "192.0.2.12")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, ssl.create_default_context(), "localhost")


def test_only_a_certificate_for_gateways_is_one_of_a_client(tmp_path: Path) -> None:
    ca = made(tmp_path)
    server = server_of(peer_file(tmp_path, "node1"), ca=ca)
    for own, believed in ((peer_file(tmp_path, "node1"), True), (certificate_file(tmp_path, "node1"), False)):
        client = ssl.create_default_context(cafile=str(ca))
        client.load_cert_chain(own)
        if believed:
            assert handshake(server, client, "one.ppdeploy.internal")
        else:
            with pytest.raises((OSError, AssertionError)):
                handshake(server, client, "one.ppdeploy.internal")


def test_keys_are_for_their_owner_and_the_ca_is_for_everybody(tmp_path: Path) -> None:
    made(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in ca_file(tmp_path).parent.iterdir()}
    assert modes == {"ca.key": 0o600, "ca.pem": 0o644, "node1.gateway.pem": 0o600, "node1.peer.pem": 0o600}
    assert b"PRIVATE KEY" not in ca_file(tmp_path).read_bytes()


def test_no_host_has_a_name_that_makes_its_files_those_of_another() -> None:
    folder = Path("inventory")
    hosts = ("node1", "node1-peer", "node1.peer", "node1.gateway", "ca")
    files = [ca_file(folder), *(of(folder, host) for host in hosts for of in (certificate_file, peer_file))]
    assert len(set(files)) == len(files)


def test_nothing_is_made_twice(tmp_path: Path) -> None:
    made(tmp_path)
    before = {path: path.read_bytes() for path in ca_file(tmp_path).parent.iterdir()}
    assert not ensure_ca(tmp_path, "lab", NOW + timedelta(days=1))
    assert not ensure_leaf(tmp_path, certificate_file(tmp_path, "node1"), "node1", NAMES, NOW + timedelta(days=1))
    assert {path: path.read_bytes() for path in ca_file(tmp_path).parent.iterdir()} == before


def test_a_certificate_is_made_anew_for_other_names_before_its_end_and_for_another_ca(tmp_path: Path) -> None:
    made(tmp_path)
    path = certificate_file(tmp_path, "node1")
    later = NOW + LEAF_LIFE - RENEW_BEFORE
    assert not ensure_leaf(tmp_path, path, "node1", NAMES, later - timedelta(days=1))
    assert ensure_leaf(tmp_path, path, "node1", NAMES, later + timedelta(days=1))
    assert ensure_leaf(tmp_path, path, "node1", [*NAMES, "192.0.2.12"], NOW)
    for lost in ("ca.key", "ca.pem"):
        (ca_file(tmp_path).parent / lost).unlink()
    assert ensure_ca(tmp_path, "lab", NOW)
    assert ensure_leaf(tmp_path, path, "node1", [*NAMES, "192.0.2.12"], NOW)
    path.write_text("no certificate")
    assert ensure_leaf(tmp_path, path, "node1", NAMES, NOW)


def test_a_broken_ca_is_told_and_left_alone(tmp_path: Path) -> None:
    made(tmp_path)
    (ca_file(tmp_path).parent / "ca.key").write_text("lost")
    with pytest.raises(InputError, match=r"^the cluster's CA cannot be used: .*trust anew$"):
        ensure_ca(tmp_path, "lab", NOW)
    assert (ca_file(tmp_path).parent / "ca.key").read_text() == "lost"


@pytest.mark.parametrize("lost", ["ca.key", "ca.pem"])
def test_no_new_ca_takes_the_place_of_one_of_which_a_part_is_missing(tmp_path: Path, lost: str) -> None:
    made(tmp_path)
    (ca_file(tmp_path).parent / lost).unlink()
    before = {path: path.read_bytes() for path in ca_file(tmp_path).parent.iterdir()}
    with pytest.raises(InputError, match=rf"^the cluster's CA cannot be used: {lost}: No such file .*trust anew$"):
        ensure_ca(tmp_path, "lab", NOW)
    assert {path: path.read_bytes() for path in ca_file(tmp_path).parent.iterdir()} == before


def test_the_first_apply_may_end_between_a_cas_key_and_its_certificate(tmp_path: Path) -> None:
    assert ensure_ca(tmp_path, "lab", NOW)
    ca_file(tmp_path).unlink()
    assert ensure_ca(tmp_path, "lab", NOW)


def test_a_ca_that_nobody_believes_now_is_told(tmp_path: Path) -> None:
    made(tmp_path)
    path = certificate_file(tmp_path, "node1")
    for now, words in (
        (NOW + CA_LIFE, r"has ended on .*set this machine's clock if it is wrong .*remove ca\.pem and ca\.key"),
        (NOW - timedelta(days=1), r"is not valid before .*set this machine's clock"),
    ):
        with pytest.raises(InputError, match=words):
            ensure_ca(tmp_path, "lab", now)
        with pytest.raises(InputError, match=words):
            ensure_leaf(tmp_path, path, "node1", NAMES, now)


def test_the_end_of_a_ca_is_told_a_year_before_and_no_certificate_is_made_at_each_apply(tmp_path: Path) -> None:
    made(tmp_path)
    assert ca_warning(tmp_path, NOW) == []
    late = NOW + CA_LIFE - timedelta(days=30)
    (line,) = ca_warning(tmp_path, late)
    assert f"{NOW + CA_LIFE:%Y-%m-%d}" in line
    path = certificate_file(tmp_path, "node1")
    assert ensure_leaf(tmp_path, path, "node1", NAMES, late)
    assert not ensure_leaf(tmp_path, path, "node1", NAMES, late + timedelta(days=1))


def test_a_certificate_without_its_key_or_of_a_time_to_come_is_made_anew(tmp_path: Path) -> None:
    made(tmp_path)
    path = certificate_file(tmp_path, "node1")
    whole = path.read_bytes()
    other = peer_file(tmp_path, "node1").read_bytes()
    begin = b"-----BEGIN PRIVATE KEY-----"
    for broken in (whole[:-60], whole[: whole.index(begin)], whole[: whole.index(begin)] + other[other.index(begin) :]):
        path.write_bytes(broken)
        assert ensure_leaf(tmp_path, path, "node1", NAMES, NOW), broken
    path.unlink()
    # The controller's clock was a year ahead.
    assert ensure_leaf(tmp_path, path, "node1", NAMES, NOW + timedelta(days=365))
    assert ensure_leaf(tmp_path, path, "node1", NAMES, NOW)


def test_a_name_beyond_ascii_is_certified_as_dns_has_it(tmp_path: Path) -> None:
    made(tmp_path)
    path = certificate_file(tmp_path, "node1")
    assert ensure_leaf(tmp_path, path, "node1", ["höst.example"], NOW)
    assert not ensure_leaf(tmp_path, path, "node1", ["höst.example"], NOW)
    client = ssl.create_default_context(cafile=str(ca_file(tmp_path)))
    assert handshake(server_of(path), client, "xn--hst-sna.example")
    with pytest.raises(InputError, match=r"no certificate can be made for the name 'ö.*'"):
        ensure_leaf(tmp_path, path, "node1", ["ö" * 70], NOW)
