"""The model's download by way of a company's network: through its proxy, beside it, and with its certificates.

Proxy and hub run on loopback, the client is the real one.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_venv
from plugins.modules import ppdeploy_weights as weights
from ppdeploy.bundle import pip
from ppdeploy.certificates import ca_file, ensure_ca, ensure_leaf
from ppdeploy.spec.plain import shown
from tests.forward_proxy import ForwardProxy
from tests.hub_standin import HubStandin, Repository
from tests.unit.test_weights import BIG, FailedError, hub_manifest, run

REPO = "org/tiny"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / BIG).write_bytes(b"w" * 300_000)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "node" / "models" / "tiny-0123456789ab"


@pytest.fixture
def hub(source: Path) -> Iterator[HubStandin]:
    with HubStandin({REPO: Repository(source)}) as running:
        yield running


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForwardProxy]:
    # The machine's own exceptions are not those of the inventory.
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    with ForwardProxy() as running:
        yield running


@pytest.fixture
def company(tmp_path: Path, source: Path) -> Iterator[tuple[HubStandin, Path]]:
    """A hub whose certificate only the company's own CA knows, and the CA's file."""
    now = datetime.now(UTC)
    ensure_ca(tmp_path, "company", now)
    leaf = tmp_path / "hub.pem"
    ensure_leaf(tmp_path, leaf, "hub", ["127.0.0.1"], now)
    with HubStandin({REPO: Repository(source)}, certificate=leaf) as running:
        yield running, ca_file(tmp_path)


def download(hub: HubStandin, directory: Path, source: Path, *, kind: str = "hub", **params: Any) -> dict[str, Any]:
    """Download by the module, from the hub or from a folder of a web server."""
    defaults = {
        "endpoint": hub.endpoint if kind == "hub" else f"{hub.endpoint}/{REPO}/resolve/main",
        "repository": REPO if kind == "hub" else None,
        "commit": hub.repositories[REPO].commit if kind == "hub" else None,
        "python": sys.executable,
        "user": pwd.getpwuid(os.geteuid()).pw_name,
    }
    return run("downloaded", directory, hub_manifest(source), **(defaults | params))


@pytest.mark.parametrize("kind", ["hub", "mirror"])
def test_every_request_goes_through_the_proxy(
    kind: str, hub: HubStandin, proxy: ForwardProxy, source: Path, directory: Path
) -> None:
    assert download(hub, directory, source, kind=kind, proxy=proxy.address)["present"]
    assert (directory / BIG).read_bytes() == (source / BIG).read_bytes()
    seen = sorted(f"{request.method} {request.path}" for request in hub.requests)
    assert seen
    told = [asked.replace(hub.endpoint, "").replace(hub.store, "") for asked in proxy.asked]
    assert sorted(told) == seen


@pytest.mark.parametrize("kind", ["hub", "mirror"])
def test_what_is_named_in_no_proxy_is_reached_beside_it(
    kind: str, hub: HubStandin, proxy: ForwardProxy, source: Path, directory: Path
) -> None:
    apart = ["elsewhere.example", "127.0.0.1"]
    assert download(hub, directory, source, kind=kind, proxy=proxy.address, no_proxy=apart)["present"]
    assert proxy.asked == []


def test_a_proxy_of_the_nodes_own_environment_is_passed_by_too(
    hub: HubStandin, proxy: ForwardProxy, source: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", proxy.address)
    assert download(hub, directory, source, no_proxy=["127.0.0.1"])["present"]
    assert proxy.asked == []


def test_the_companys_certificate_is_trusted_through_the_proxy_too(
    company: tuple[HubStandin, Path], proxy: ForwardProxy, source: Path, directory: Path
) -> None:
    hub, certificates = company
    assert download(hub, directory, source, proxy=proxy.address, ca_bundle=str(certificates))["present"]
    ports = {address.rpartition(":")[2] for address in (hub.endpoint, hub.store)}
    assert set(proxy.asked) == {f"CONNECT 127.0.0.1:{port}" for port in ports}


def test_without_its_certificates_the_variable_is_named(
    company: tuple[HubStandin, Path], source: Path, directory: Path, tmp_path: Path
) -> None:
    hub, _ = company
    with pytest.raises(FailedError, match=r"is not trusted on .* in ppdeploy_ca_bundle"):
        download(hub, directory, source)
    assert hub.requests == []
    with pytest.raises(FailedError, match=r"ppdeploy_ca_bundle names .*/absent\.pem, which is no file on"):
        download(hub, directory, source, ca_bundle=str(tmp_path / "absent.pem"))


def test_a_proxy_that_wants_a_password_is_named(hub: HubStandin, source: Path, directory: Path) -> None:
    with ForwardProxy(refuses=407) as proxy, pytest.raises(FailedError, match="check ppdeploy_proxy, or name the host"):
        download(hub, directory, source, proxy=proxy.address)
    assert hub.requests == []


@pytest.mark.parametrize("kind", ["hub", "mirror"])
@pytest.mark.parametrize("refuses", [403, 502])
def test_what_a_proxy_answers_is_not_taken_for_the_hubs_word(
    kind: str, refuses: int, hub: HubStandin, source: Path, directory: Path
) -> None:
    with ForwardProxy(refuses=refuses) as proxy, pytest.raises(FailedError, match=r"check ppdeploy_proxy, or") as error:
        download(hub, directory, source, kind=kind, proxy=proxy.address)
    assert "refused the token" not in str(error.value)
    assert hub.requests == []


@pytest.mark.parametrize("password", ["s3cret", "s3@cret"])
def test_a_password_in_an_address_is_in_no_word(password: str) -> None:
    for text in (f"http://me:{password}@proxy:1", f"at 'https://{password}@proxy/simple' (x)"):
        for told in (weights.redacted(text), ppdeploy_venv.redacted(text), pip.redacted(text), shown(text)):
            assert "***@proxy" in told
            assert "cret" not in told
    # One that was not escaped is no address, and is refused with the value.
    assert shown(f"http://me:{password}/x@proxy") == '"http://***@proxy"'
