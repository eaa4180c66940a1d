"""The gateway on hosts of its own, with real HAProxy and stand-ins of vLLM behind it: nothing gets past it, and nothing
that it is told to do costs a client an answer.

The role is run alone, with the plan's own decisions. Two pipelines of one host each serve one model, and later two;
then a third host, which is in no pipeline, becomes a gateway and ceases to be one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ppdeploy.api_keys import add_key, keys_file
from ppdeploy.certificates import ca_file, certificate_file, peer_file
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory, LabPipeline
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from tests.lab.cluster import Done, no_change
from tests.lab.guarded import HEADS, PORT, Guarded, Load

UNIT = "ppdeploy-gateway"
KEY = re.compile(r"sk-[A-Za-z0-9_-]{43}")

#: As small as they can be tried with few clients. A pipeline takes 8 requests at once, and 6 wait.
WANTS: dict[str, Any] = {
    "vllm_args": {"compilation-config": {"mode": 2, "backend": "eager"}, "max-num-seqs": 8},
    "gateway_concurrency": 16,
    "gateway_rate": 100_000,
    "gateway_queue": 6,
    "gateway_body_mib": 1,
    "gateway_timeout": 10,
}

_STATE = r"""
find /etc /opt /var/lib/ppdeploy /usr/sbin -xdev \( -type d -printf '%p %M\n' -o -type l -printf '%p %l\n' \
  -o -type f -printf '%p %M %u:%g\n' -exec sha256sum {} + \) 2>/dev/null | sort
systemctl list-unit-files --no-legend --no-pager | sort
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Three bare hosts, two of them with a pipeline each, taken down at the end."""
    lab = Lab(f"{default_name()}-gateway")
    try:
        lab.down()
        model = str(tiny_model())
        pipelines = (LabPipeline("one", ("node1",), model), LabPipeline("two", ("node2",), model))
        described = LabInventory(pipelines=pipelines, gateways=("node3",))
        inventory = lab.up(3, inventory=described, owner=os.getpid())
        yield Guarded(lab, inventory, tmp_path_factory.mktemp("gateway"), [], wants=dict(WANTS))
    finally:
        lab.down()


def state(guarded: Guarded) -> dict[str, list[str]]:
    """Return every file of the hosts with what is in it, and the units."""
    return {node: guarded.out(node, _STATE).splitlines() for node in HEADS}


@pytest.fixture(scope="module")
def bare(guarded: Guarded) -> dict[str, list[str]]:
    """The hosts before there was a gateway."""
    return state(guarded)


@pytest.fixture(scope="module")
def applied(guarded: Guarded, bare: dict[str, list[str]]) -> Done:
    """The first apply, and stand-ins that serve."""
    assert bare
    done = guarded.guard()
    assert done.code == 0, done.said
    (guarded.key,) = set(KEY.findall(done.out))
    # A key that has expired is told to gateways like any other.
    now = datetime.now(UTC)
    guarded.old = add_key(guarded.folder, "old", now - timedelta(hours=1), now - timedelta(hours=2))
    made = guarded.ppdeploy("keys", "add", "bob", "--expires", "1h")
    assert made.code == 0, made.said
    guarded.bob = made.out.strip()
    assert KEY.fullmatch(guarded.bob), made.said
    assert not any(key in made.err for key in (guarded.key, guarded.old, guarded.bob))
    for node in HEADS:
        guarded.stand_in(node, "tiny-llama")
    guarded.wait_until_healthy(*HEADS)
    return done


# ---- the play --------------------------------------------------------------------------------------------------------


def test_check_shows_it_all_and_changes_nothing(guarded: Guarded, bare: dict[str, list[str]]) -> None:
    done = guarded.guard("--check", "--diff")
    assert done.code == 0, done.said
    assert min(done.changed().values()) > 0
    for line in (f"+    bind *:{PORT} ssl crt /etc/ppdeploy/gateway/certificate.pem alpn h2,http/1.1", "+[Service]"):
        assert f"\n{line}\n" in done.out, line
    assert not KEY.search(done.out)
    assert not keys_file(guarded.folder).exists()
    assert state(guarded) == bare


def test_the_first_apply_says_the_key_and_the_ca_and_the_second_changes_nothing(
    guarded: Guarded, applied: Done
) -> None:
    assert applied.out.count(guarded.key) == 1
    assert str(ca_file(guarded.folder)) in applied.out
    assert guarded.key not in keys_file(guarded.folder).read_text(encoding="utf-8")
    assert keys_file(guarded.folder).stat().st_mode & 0o777 == 0o600
    before = state(guarded)
    again = guarded.guard()
    assert (again.code, again.changed()) == (0, no_change()), again.said
    assert not KEY.search(again.out)
    assert state(guarded) == before


@pytest.mark.usefixtures("applied")
def test_every_host_looks_as_planned(guarded: Guarded) -> None:
    done, failed = guarded.testinfra("test_gateway")
    assert (done.code, failed) == (0, set()), done.said


# ---- the door --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("applied")
def test_only_the_gateway_and_ssh_are_open(guarded: Guarded) -> None:
    def knock() -> list[int]:
        found = []
        for port in (22, 80, 443, 8000, 8001, 8080, 8404, 8405, PORT, 8444, 29500, 29501, 29502):
            with socket.socket() as one:
                one.settimeout(1)
                if one.connect_ex((guarded.lab.management_address("node1"), port)) == 0:
                    found.append(port)
        return found

    assert guarded.outside(knock) == [22, PORT, 8444]


@pytest.mark.usefixtures("applied")
def test_other_gateways_need_a_certificate_for_that(guarded: Guarded) -> None:
    for own in (None, certificate_file(guarded.folder, "node1")):
        refused = guarded.call_peers(own)
        assert not refused.startswith("HTTP"), refused
    assert guarded.call_peers(peer_file(guarded.folder, "node2")) == "HTTP/1.1 200 OK"
    # A certificate for gateways that the plan does not name: of the gateway itself.
    assert guarded.call_peers(peer_file(guarded.folder, "node1")) == "HTTP/1.1 404 Not Found"


TRICKS = (
    "//v1/models",
    "/v1//models",
    "/./v1/models",
    "/v1/../invocations",
    "/v1/%2e%2e/invocations",
    "/v1/%6dodels",
    "/%761/models",
    "/V1/models",
    "/v1/Models",
    "/v1/models/",
    "/v1/models;x",
    "/v1/models%00",
    "/v1\\models",
    "/v1/models/../../invocations",
    "/invocations",
    "/ping",
    "/version",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/tokenize",
    "/v1/load_lora_adapter",
    "/v1/responses/resp_1",
    "/healthz",
    "*",
)


@pytest.mark.usefixtures("applied")
def test_no_other_path_leads_to_the_engine(guarded: Guarded) -> None:
    seen = {node: len(guarded.arrived(node)) for node in HEADS}
    for path in TRICKS:
        for method in ("GET", "POST", "OPTIONS"):
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {guarded.key}\r\n"
            answer = guarded.raw(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
            assert re.match(rb"HTTP/1.1 (404|400) ", answer), (method, path, answer)
    # The absolute form is told on as the path that it has.
    for target, status in (("http://x/invocations", 404), ("http://y/v1/models", 400), ("http://x/v1/models", 200)):
        head = f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {guarded.key}\r\nConnection: close\r\n\r\n"
        assert guarded.raw(head.encode()).startswith(f"HTTP/1.1 {status} ".encode()), target
    arrived = [one for node in HEADS for one in guarded.arrived(node)[seen[node] :]]
    assert [(one["method"], one["path"]) for one in arrived] == [("GET", "/v1/models")]
    assert {"authorization", "x-api-key", "upgrade"} & set(arrived[0]["headers"]) == set()
    assert arrived[0]["from"] == "198.18.0.1"


SMUGGLED = b"GET /invocations HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize(
    "extra",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 41\r\n\r\n",
        b"Content-Length: 0, 41\r\n\r\n",
        b"Content-Length: +0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"X: a\rTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
        b"X: a\nContent-Length: 0\n\n",
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\nConnection: Upgrade\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_no_request_hides_in_another(guarded: Guarded, extra: bytes) -> None:
    seen = {node: len(guarded.arrived(node)) for node in HEADS}
    body = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + guarded.key.encode() + b"\r\n"
    answers = guarded.raw(body + extra + SMUGGLED, wait=1.0)
    statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answers)
    assert len(statuses) <= 2, answers
    # What was hidden is a request of its own, without a key and on no path of ours, or nothing.
    assert set(statuses[1:]) <= {b"404", b"400"}, answers
    arrived = [one for node in HEADS for one in guarded.arrived(node)[seen[node] :]]
    assert all(one["path"] == "/v1/completions" for one in arrived), arrived
    assert all("upgrade" not in one["headers"] for one in arrived), arrived


# ---- limits and streams ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("applied")
def test_what_is_too_large_or_of_no_known_length_is_refused(guarded: Guarded) -> None:
    over = guarded.ask("words=1 " + "x" * (1 << 20), headers={"connection": "close"})
    assert (over.status, over.code) == (413, "request_too_large")
    under = guarded.ask("words=1 " + "x" * ((1 << 20) - 2000))
    assert under.status == 200
    pieces = guarded.request("POST", "/v1/completions", content=iter([b"{}"]))
    assert (pieces.status, pieces.code) == (411, "length_required")
    put = guarded.request("PUT", "/v1/completions", content=b"{}")
    assert (put.status, put.code, put.headers["allow"]) == (405, "method_not_supported", "POST")


@pytest.mark.usefixtures("applied")
def test_streams_come_as_they_are_made_and_are_not_cut(guarded: Guarded) -> None:
    """The gateway gives up what is silent for 10 s; a stream may last longer, and each word comes at once."""

    def stream() -> list[float]:
        body = {"model": "tiny-llama", "prompt": "words=13 pause=1", "stream": True}
        with guarded.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            began = time.monotonic()
            return [time.monotonic() - began for line in answer.iter_lines() if "{" in line]

    with ThreadPoolExecutor(3) as pool:
        coming = pool.submit(guarded.outside, stream)
        silent = pool.submit(guarded.ask, "slow=12")
        failed = pool.submit(guarded.ask, "status=500")
    times = coming.result()
    assert len(times) == 13
    assert times[-1] > 11.5
    assert all(abs(time - index) < 0.8 for index, time in enumerate(times)), times
    answer = silent.result()
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (504, "timeout", "10")
    # What the engine itself says is told on as it is.
    assert (failed.result().status, failed.result().json["error"]["type"]) == (500, "InternalServerError")


@pytest.mark.usefixtures("applied")
def test_more_than_a_key_may_or_pipelines_can_is_told_at_once(guarded: Guarded) -> None:
    """A key may have 16 requests under way; two pipelines take 8 each, and 6 wait."""
    slow = {"prompt": "slow=6"}
    with ThreadPoolExecutor(40) as pool:
        first = [pool.submit(guarded.ask, **slow) for _ in range(20)]
        end = time.monotonic() + 5
        while sum(one.done() for one in first) < 4:
            assert time.monotonic() < end, [one.result() for one in first if one.done()]
            time.sleep(0.05)
        bearer = {"authorization": f"Bearer {guarded.bob}"}
        second = [pool.submit(guarded.ask, headers=bearer, **slow) for _ in range(10)]
    for futures, status, served, code in ((first, 429, 16, "rate_limit_exceeded"), (second, 503, 6, "overloaded")):
        answers = [one.result() for one in futures]
        refused = [answer for answer in answers if answer.status == status]
        assert len([answer for answer in answers if answer.status == 200]) == served, answers
        assert len(refused) == 4
        assert {answer.code for answer in refused} == {code}
        assert all(int(answer.headers["retry-after"]) > 0 and answer.seconds < 5 for answer in refused)


@pytest.mark.usefixtures("applied")
def test_who_has_no_key_gets_nothing(guarded: Guarded) -> None:
    old, bob = guarded.old, guarded.bob
    assert guarded.request("GET", "/v1/models", headers={"authorization": f"Bearer {bob}"}).status == 200
    assert guarded.request("GET", "/v1/models", headers={"authorization": "", "x-api-key": bob}).status == 401
    other = f"GET /health HTTP/1.1\r\nHost: x\r\nX-Api-Key: {bob}\r\nConnection: close\r\n\r\n"
    assert guarded.raw(other.encode()).startswith(b"HTTP/1.1 200 ")
    taken = guarded.ppdeploy("keys", "add", "bob")
    assert (taken.code, taken.out) == (2, ""), taken.said
    gone = guarded.ppdeploy("keys", "revoke", "bob")
    assert gone.code == 0, gone.said
    listed = guarded.ppdeploy("keys", "list")
    assert re.findall(r"^(\w+) +(\w+)", listed.out, re.MULTILINE)[1:] == [
        ("first", "valid"),
        ("old", "expired"),
        ("bob", "revoked"),
    ]
    seen = {node: len(guarded.arrived(node)) for node in HEADS}
    wrong = ["", "Bearer", f"Basic {guarded.key}", "Bearer sk-wrong", f"Bearer {guarded.key}x", f"Bearer {old}"]
    for value in [*wrong, f"Bearer {bob}", f"Bearer {guarded.key}, Bearer {guarded.key}"]:
        for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/v1/completions")):
            answer = guarded.request(method, path, headers={"authorization": value})
            assert (answer.status, answer.code) == (401, "invalid_api_key"), (value, path, answer)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert {node: len(guarded.arrived(node)) for node in HEADS} == seen
    for said in (taken, gone, listed):
        assert not any(secret in said.out + said.err for secret in (guarded.key, old, bob))
    files = guarded.out("node1", f"cat /etc/ppdeploy/gateway/keys.map; journalctl --no-pager --unit {UNIT}")
    assert not any(secret in files for secret in (guarded.key, old, bob))


@pytest.mark.usefixtures("applied")
def test_a_smoke_test_and_a_change_of_keys_do_not_meet(guarded: Guarded) -> None:
    folder, control = "/etc/ppdeploy/gateway", "/run/ppdeploy-gateway/admin.sock"
    known = "import socket as s; c = s.socket(1); c.connect('{}'); c.sendall(b'%s\\n'); print(c.recv(65536).decode())"

    def ask(command: str) -> str:
        return guarded.out("node1", f'python3 -c "{known.format(control) % command}"')

    # As ppdeploy_smoke does for the time of its requests.
    under_way = "C" * 64
    ask(f"add map {folder}/keys.map <<\\n{under_way} {int(time.time()) + 600} +ppdeploy-smoke\\n")
    assert " +ppdeploy-smoke" in ask(f"show map {folder}/keys.map")
    assert guarded.ppdeploy("keys", "add", "erin").code == 0
    assert guarded.ppdeploy("keys", "revoke", "erin").code == 0
    assert under_way in ask(f"show map {folder}/keys.map")
    again = guarded.guard()
    assert (again.code, again.changed()) == (0, no_change()), again.said
    assert under_way not in guarded.out("node1", f"cat {folder}/keys.map")
    ask(f"del map {folder}/keys.map {under_way}")


@pytest.mark.usefixtures("applied")
def test_a_key_that_was_revoked_does_not_come_back_with_an_older_file_of_keys(guarded: Guarded) -> None:
    made = guarded.ppdeploy("keys", "add", "frank")
    older = keys_file(guarded.folder).read_text(encoding="utf-8")
    assert guarded.ppdeploy("keys", "revoke", "frank").code == 0
    newer = keys_file(guarded.folder).read_text(encoding="utf-8")
    keys_file(guarded.folder).write_text(older, encoding="utf-8")
    done = guarded.guard()
    assert done.code == 2, done.said
    assert "bring the newer file here" in done.out
    answer = guarded.request("GET", "/v1/models", headers={"authorization": f"Bearer {made.out.strip()}"})
    assert answer.status == 401
    keys_file(guarded.folder).write_text(newer, encoding="utf-8")
    again = guarded.guard()
    assert (again.code, again.changed()) == (0, no_change()), again.said


@pytest.mark.usefixtures("applied")
def test_a_ca_of_which_a_part_is_missing_is_told_and_stays(guarded: Guarded) -> None:
    key, before = ca_file(guarded.folder).with_name("ca.key"), ca_file(guarded.folder).read_bytes()
    key.rename(key.with_suffix(".away"))
    done = guarded.guard()
    key.with_suffix(".away").rename(key)
    assert done.code == 2, done.said
    assert "the cluster's CA cannot be used: ca.key: No such file or directory" in done.out
    assert ca_file(guarded.folder).read_bytes() == before


# ---- changes and faults under load -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("applied")
def test_keys_and_reloads_under_load_cost_no_answer(guarded: Guarded) -> None:
    main = guarded.out("node1", f"systemctl show --property=MainPID {UNIT}")
    with Load(guarded, 10, "pause=0.3", words=6) as load:
        made = guarded.ppdeploy("keys", "add", "carol")
        carol = made.out.strip()
        assert made.code == 0, made.said
        assert guarded.request("GET", "/health", headers={"authorization": f"Bearer {carol}"}).status == 200
        assert guarded.ppdeploy("keys", "revoke", "carol").code == 0
        assert guarded.request("GET", "/health", headers={"authorization": f"Bearer {carol}"}).status == 401
        load.wait_for(10)
        done = guarded.guard(gateway_rate=120)
        assert done.code == 0, done.said
        assert done.changed() == {"node1": 2, "node2": 2}
        for _ in range(3):
            guarded.out("node1", f"systemctl reload {UNIT}")
        load.wait_for(10)
        # A configuration that is wrong leaves the running one alone.
        guarded.out(
            "node1",
            "cd /etc/ppdeploy/gateway; cp -p haproxy.cfg kept; echo nonsense >> haproxy.cfg; "
            f"! systemctl reload {UNIT} 2>/dev/null; mv kept haproxy.cfg",
        )
        load.wait_for(10)
    assert load.lost == []
    assert guarded.out("node1", f"systemctl show --property=MainPID {UNIT}") == main


@pytest.mark.usefixtures("applied")
def test_a_key_that_asks_too_often_is_told_when_to_come_again(guarded: Guarded) -> None:
    def often() -> list[int]:
        with guarded.client() as client:
            answers = [client.get("/health") for _ in range(130)]
        assert {answer.headers["retry-after"] for answer in answers if answer.status_code == 429} == {"10"}
        return [answer.status_code for answer in answers]

    statuses = guarded.outside(often)
    assert 429 in statuses
    # The other gateway counts for itself.
    assert guarded.request("GET", "/health", node="node2").status == 200
    # The next test is about the other way to balance.
    guarded.wants |= {"gateway_rate": 100_000, "gateway_balance": "prefix"}
    assert guarded.guard().code == 0
    assert guarded.request("GET", "/health").status == 200


@pytest.mark.usefixtures("applied")
def test_requests_that_begin_alike_go_to_one_pipeline(guarded: Guarded) -> None:
    guarded.wait_until_healthy(*HEADS)
    system = {"role": "system", "content": "You answer in one word. " * 40}
    for turn in range(4):
        for chat in range(8):
            messages = [system, {"role": "user", "content": f"Question {chat} mark=chat{chat} "}]
            messages += [{"role": "user", "content": f"and turn {turn} is another one"}] * turn
            body = {"model": "tiny-llama", "messages": messages}
            assert guarded.request("POST", "/v1/chat/completions", node=HEADS[turn % 2], json=body).status == 200
    for _ in range(3):
        assert guarded.ask("A text of its own mark=text").status == 200
    places: dict[str, set[str]] = {}
    for node in HEADS:
        for one in guarded.arrived(node):
            places.setdefault(one["mark"], set()).add(node)
    chats = {mark: nodes for mark, nodes in places.items() if mark.startswith("chat")}
    # Whichever gateway was asked, and with another question at the end.
    assert len(chats) == 8
    assert all(len(nodes) == 1 for nodes in (*chats.values(), places["text"])), places
    assert set().union(*chats.values()) == set(HEADS), places
    assert guarded.guard(gateway_balance="leastconn").code == 0


@pytest.mark.usefixtures("applied")
def test_a_dead_pipeline_costs_the_requests_that_it_had(guarded: Guarded) -> None:
    for victim in ("node2", "node1"):
        guarded.wait_until_healthy("node1", "node2")
        with Load(guarded, 8, "pause=0.1", words=5) as load:
            died = time.monotonic()
            guarded.out(victim, "pkill -KILL -P $(systemctl show --property=MainPID --value stand-in)")
            gone = time.monotonic()
            load.wait_for(40)
        assert 0 < len(load.lost) <= 8, load.lost
        assert all(lost.began < gone and lost.ended < gone + 2 for lost in load.lost), (died, gone, load.lost)
        guarded.stand_in(victim, "tiny-llama")


@pytest.mark.usefixtures("applied")
def test_a_draining_pipeline_and_a_stopped_gateway_lose_nothing(guarded: Guarded) -> None:
    guarded.wait_until_healthy("node1", "node2")
    with ThreadPoolExecutor(1) as pool:
        with Load(guarded, 6, "pause=0.1", words=5) as load:
            guarded.out("node2", "touch /run/stand-in.jsonl.draining")
            time.sleep(4)
            before = len(guarded.arrived("node2"))
            load.wait_for(12)
            assert len(guarded.arrived("node2")) == before
        assert load.lost == []
        last = pool.submit(guarded.ask, "words=20 pause=0.2", node="node2")
        time.sleep(1)
        began = time.monotonic()
        guarded.out("node2", f"systemctl stop {UNIT}")
        assert time.monotonic() - began > 1.5
        assert last.result().status == 200
    guarded.out("node2", f"rm /run/stand-in.jsonl.draining; systemctl start {UNIT}")
    guarded.out("node1", "touch /run/stand-in.jsonl.draining")
    guarded.out("node2", "touch /run/stand-in.jsonl.draining")
    time.sleep(4)
    for answer in (guarded.request("GET", "/health"), guarded.ask("words=1")):
        assert (answer.status, answer.code) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) > 0
    for node in HEADS:
        guarded.out(node, "rm /run/stand-in.jsonl.draining")


@pytest.mark.usefixtures("applied")
def test_the_log_tells_who_asked_and_not_what(guarded: Guarded) -> None:
    guarded.wait_until_healthy("node1")
    guarded.ask("mark=a-secret-prompt words=1")
    guarded.request("GET", f"/v1/{guarded.key}")
    journal = guarded.out("node1", f"journalctl --sync; journalctl --no-pager --unit {UNIT}")
    (line,) = re.findall(r"^.*path=/v1/completions.*$", journal, re.MULTILINE)[-1:]
    assert re.search(r" 198\.18\.0\.1:\d+ model1/(one|two) status=200 .* key=first path=/v1/completions id=", line)
    assert "a-secret-prompt" not in journal
    assert guarded.key not in journal


# ---- two models, and none --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("applied")
def test_two_models_are_one_api(guarded: Guarded) -> None:
    guarded.names = {"one": "org/small", "two": "large:v2"}
    done = guarded.guard()
    assert done.code == 0, done.said
    guarded.stand_in("node1", "org/small")
    guarded.stand_in("node2", "large:v2")
    time.sleep(4)
    for node in HEADS:
        listed = guarded.request("GET", "/v1/models", node=node).json
        assert [model["id"] for model in listed["data"]] == ["org/small", "large:v2"]
        assert all(abs(model["created"] - time.time()) < 60 for model in listed["data"])
        for model in ("org/small", "large:v2"):
            # The model's name may stand behind a long prompt, as OpenAI's client writes it.
            body = {"messages": [{"role": "user", "content": "words=1 " + "x" * 900_000}], "model": model}
            answer = guarded.request("POST", "/v1/chat/completions", node=node, json=body)
            assert (answer.status, answer.json["model"]) == (200, model)
        for asked in ({"model": "other"}, {}, {"model": 3}, {"x": {"model": "large:v2"}}):
            answer = guarded.request("POST", "/v1/completions", node=node, json={"prompt": "words=1", **asked})
            assert (answer.status, answer.code) == (404, "model_not_found"), asked
    http2 = guarded.out(
        "node2",
        "curl --silent --show-error --insecure --http2 --write-out '%{http_version} %{http_code}' --output /dev/null "
        f"--header 'Authorization: Bearer {guarded.key}' https://127.0.0.1:{PORT}/v1/models",
    )
    assert http2 == "2 200"


# ---- on a host in no pipeline ----------------------------------------------------------------------------------------


def answers(guarded: Guarded, node: str) -> list[int]:
    """Return the statuses that a gateway answers to a completion of each of the two models."""
    asked = [{"model": model, "prompt": "words=1"} for model in ("org/small", "large:v2")]
    return [guarded.request("POST", "/v1/completions", node=node, json=body).status for body in asked]


def remains(guarded: Guarded, node: str) -> str:
    """Return what there is of a gateway on a host."""
    paths = f"/etc/ppdeploy/gateway /etc/systemd/system/{UNIT}* /run/ppdeploy-gateway"
    return guarded.out(node, f"ls -d {paths} 2>/dev/null || true; pgrep -a haproxy || true")


@pytest.mark.usefixtures("applied")
def test_a_host_in_no_pipeline_is_refused_where_a_program_has_its_port(guarded: Guarded) -> None:
    guarded.third = True
    guarded.write_inventory()
    guarded.out("node3", f"systemd-run --quiet --collect --unit=stranger python3 -m http.server {PORT}")
    try:
        done = guarded.ppdeploy("plan")
    finally:
        guarded.out("node3", "systemctl stop stranger")
    assert done.code == 3, done.said
    # So is every head here, where the stand-in has vLLM's port.
    stranger = (
        rf"port {PORT} is taken by \S*python3 \(stranger\.service, pid \d+\) \(node3\): stop that program or set "
    )
    assert re.search(f"{stranger}ppdeploy_gateway_port to a free port", done.error), done.said
    # Two hosts on no common fabric with the third: by the addresses of ansible_host.
    shown = " ".join(done.out.split())
    assert "gateway node3 https://198.18.0.13:8443 to one at 198.18.0.11:8444, two at 198.18.0.12:8444" in shown
    assert remains(guarded, "node3") == ""


@pytest.mark.long
@pytest.mark.usefixtures("applied")
def test_a_host_in_no_pipeline_is_a_gateway_that_heads_know(guarded: Guarded) -> None:
    guarded.third = True
    done = guarded.guard()
    assert done.code == 0, done.said
    # The heads learn its name and nothing else.
    assert {node: done.changed()[node] for node in HEADS} == {"node1": 2, "node2": 2}
    end = time.monotonic() + 20
    while answers(guarded, "node3") != [200, 200]:
        assert time.monotonic() < end, answers(guarded, "node3")
        time.sleep(0.5)
    models = guarded.request("GET", "/v1/models", node="node3").json["data"]
    assert [model["id"] for model in models] == ["org/small", "large:v2"]
    bare = guarded.request("POST", "/v1/completions", node="node3", json={}, headers={"authorization": "Bearer sk-no"})
    assert (bare.status, bare.code) == (401, "invalid_api_key")
    # The way leads through the heads' gateways, which know who calls.
    journal = guarded.out("node2", f"journalctl --sync; journalctl --no-pager --unit {UNIT}")
    assert re.search(r" own/two status=200 .* peer=node3\.gateway\.ppdeploy\.internal id=", journal)
    made = guarded.ppdeploy("keys", "add", "dora")
    assert made.code == 0, made.said
    assert "node1, node2, node3" in made.err
    dora = {"authorization": f"Bearer {made.out.strip()}"}
    assert guarded.request("GET", "/health", node="node3", headers=dora).status == 200
    assert guarded.ppdeploy("keys", "revoke", "dora").code == 0
    assert guarded.request("GET", "/health", node="node3", headers=dora).status == 401
    again = guarded.guard()
    assert (again.code, again.changed()) == (0, no_change((*HEADS, "node3"))), again.said
    tested, failed = guarded.testinfra("test_gateway", hosts="vllm,ansible://gateway")
    assert (tested.code, failed) == (0, set()), tested.said
    assert guarded.tested() == {*HEADS, "node3"}
    # A check looks at it too, here for a port that sshd has.
    looked = guarded.ppdeploy("check", "--json", "-e", "ppdeploy_gateway_port=22")
    assert looked.code == 3, looked.said
    results = [one for one in json.loads(looked.out)["results"] if one["host"] == "node3"]
    assert [(one["id"], one["verdict"], one["pipeline"]) for one in results] == [("port-taken", "blocked", "")], results


@pytest.mark.long
@pytest.mark.usefixtures("applied")
def test_a_host_that_leaves_the_group_is_no_gateway_any_more(guarded: Guarded) -> None:
    guarded.third = False
    certificate = peer_file(guarded.folder, "node3")
    kept = certificate.read_bytes()
    foreseen = guarded.guard("--check")
    assert foreseen.code == 0, foreseen.said
    assert foreseen.changed()["node3"] > 0
    assert certificate.exists()
    assert remains(guarded, "node3")
    done = guarded.guard()
    assert done.code == 0, done.said
    assert remains(guarded, "node3") == ""
    assert not certificate.exists()
    assert not certificate_file(guarded.folder, "node3").exists()
    # Who has kept its certificate is let in no more.
    path = guarded.elsewhere / "kept.pem"
    path.write_bytes(kept)
    assert guarded.call_peers(path) == "HTTP/1.1 404 Not Found"
    again = guarded.guard()
    assert (again.code, again.changed()) == (0, no_change()), again.said
    for node in HEADS:
        assert answers(guarded, node) == [200, 200]


@pytest.mark.usefixtures("applied")
def test_without_a_gateway_nothing_of_it_is_left(guarded: Guarded) -> None:
    guarded.third = False
    done = guarded.guard(gateway=False)
    assert done.code == 0, done.said
    for node in HEADS:
        assert remains(guarded, node) == ""
    again = guarded.guard()
    assert (again.code, again.changed()) == (0, no_change()), again.said
