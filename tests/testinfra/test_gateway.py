"""`gateway` guards the API on every head and every host of the group `gateway`, as planned, and nowhere else."""

from __future__ import annotations

from typing import Any

from ppdeploy.plan.gateway import CERTIFICATE, CONFIG, FOLDER, KEYS_MAP, PEER_CERTIFICATE, UNIT, UNIT_NAME
from ppdeploy.plan.types import GatewayPlan, PlannedFile
from tests.testinfra.conftest import exposure


def test_its_files_are_as_planned(
    host: Any, gateway: GatewayPlan | None, gateway_files: dict[str, tuple[PlannedFile, str]]
) -> None:
    assert bool(gateway_files) == (gateway is not None)
    for path, (file, text) in gateway_files.items():
        found = host.file(path)
        assert found.content_string == text, path
        assert (found.user, found.group, f"{found.mode:04o}") == (file.owner, file.group, file.mode)
    if gateway is None:
        assert not host.file(UNIT).exists
        assert not host.file(FOLDER).exists


def test_its_secrets_are_for_root_alone(host: Any, gateway: GatewayPlan | None) -> None:
    if gateway is None:
        return
    wanted = [KEYS_MAP, *([CERTIFICATE] if gateway.certificate_is_ours else [])]
    wanted += [PEER_CERTIFICATE] if gateway.peer_name else []
    for path in wanted:
        found = host.file(path)
        assert (found.user, found.group, f"{found.mode:04o}") == ("root", "root", "0600"), path
    folder = host.file(FOLDER)
    assert (folder.user, f"{folder.mode:04o}") == ("root", "0700")


def test_it_runs_now_and_at_each_boot(host: Any, gateway: GatewayPlan | None) -> None:
    if gateway is None:
        return
    service = host.service(UNIT_NAME)
    assert service.is_enabled
    # It binds ports below 1024 and becomes another user, so it starts as root; as Debian ships HAProxy it is 9.6.
    assert exposure(host, UNIT_NAME) <= 3.0
    assert service.is_running, host.run(f"journalctl --no-pager --lines=20 --unit={UNIT_NAME}").stdout
    address = "0.0.0.0" if gateway.address == "*" else gateway.address  # noqa: S104  (looked at, not bound)
    assert host.socket(f"tcp://{address}:{gateway.port}").is_listening
    assert host.socket(f"tcp://127.0.0.1:{gateway.metrics_port}").is_listening


def test_the_configuration_is_one_that_haproxy_takes(host: Any, gateway: GatewayPlan | None) -> None:
    if gateway is not None:
        assert host.run(f"/usr/sbin/haproxy -c -q -f {CONFIG}").rc == 0
