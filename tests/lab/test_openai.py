"""The gateway before real ranks: OpenAI's own Python client works unchanged, and the smoke test goes through it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ppdeploy.certificates import ca_file
from tests.lab.cluster import Cluster

CLIENT = Path(__file__).with_name("openai_client.py")


def test_openais_client_works_unchanged(served: Cluster) -> None:
    made = served.ppdeploy("keys", "add", "openai")
    assert made.code == 0, made.said
    address = served.lab.management_address("node1")
    told = {
        "OPENAI_BASE_URL": f"https://{address}:8443/v1",
        "OPENAI_API_KEY": made.out.strip(),
        "SSL_CERT_FILE": str(ca_file(served.inventory.parent)),
    }
    command = ["env", *(f"{name}={value}" for name, value in told.items()), sys.executable, str(CLIENT)]
    found = json.loads(served.lab.run_in_ns(command).stdout)

    assert found["models"] == ["tiny-llama"]
    assert found["whole"]
    assert len(found["stream"]) > 1
    assert "".join(found["stream"]) == found["whole"]
    assert found["chat"]["tokens"] == 8
    (tool,) = found["tools"]
    assert tool["name"] == "weather"
    assert isinstance(json.loads(tool["arguments"])["warm"], bool)
    assert found["errors"] == [
        ["AuthenticationError", 401, True],
        ["NotFoundError", 404, True],
        ["BadRequestError", 400, True],
    ]
    assert found["async"] == [found["whole"]] * 4
    assert served.ppdeploy("keys", "revoke", "openai").code == 0


#: The keys that HAProxy has in memory, which are more than those of the file while somebody has added one.
_KEYS = """
import socket
with socket.socket(socket.AF_UNIX) as control:
    control.connect("/run/ppdeploy-gateway/admin.sock")
    control.sendall(b"show map /etc/ppdeploy/gateway/keys.map\\n")
    print(control.makefile().read())
"""


def test_the_smoke_test_goes_through_the_gateway_and_says_when_it_cannot(served: Cluster) -> None:
    done = served.ppdeploy("smoke", "--json")
    assert done.code == 0, done.said
    (report,) = done.result["smoke"]
    assert ("gateway", True) in [(check["id"], check["ok"]) for check in report["checks"]]
    assert "ppdeploy-smoke" not in served.lab.exec_ssh("node1", ["python3", "-c", _KEYS]).stdout
    pids = served.pids()
    served.out("node1", "systemctl stop ppdeploy-gateway")
    try:
        done = served.ppdeploy("smoke")
    finally:
        served.out("node1", "systemctl start ppdeploy-gateway")
    assert done.code == 5, done.said
    assert "pipeline tiny serves, but not through the gateway on node1" in done.said
    assert served.pids() == pids
