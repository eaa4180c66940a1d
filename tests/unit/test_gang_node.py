"""The agent's hands on a node: processes, journals, the engine's API, the fence, the one file."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppdeploy.agent import cgroup, config, engine, journal, main, metrics, ready, unit
from ppdeploy.agent import core as core_module
from ppdeploy.agent.build import agent_pyz, write
from ppdeploy.agent.messages import NONE, GenerationId
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import Identity, Local
from ppdeploy.paths import data_root

AGENT = Path(config.__file__).parent


# Processes.


def test_processes_are_found_at_every_level(tmp_path: Path) -> None:
    group = tmp_path / "unit"
    (group / "below" / "deeper").mkdir(parents=True)
    (group / "cgroup.procs").write_text("1\n2\n")
    (group / "below" / "cgroup.procs").write_text("")
    (group / "below" / "deeper" / "cgroup.procs").write_text("33\n")
    assert cgroup.processes(group) == {1, 2, 33}
    assert cgroup.processes(tmp_path / "gone") == set()


def test_processes_are_told_with_their_state_and_memory() -> None:
    ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        end = time.monotonic() + 30
        # A process that has only just begun has no memory yet.
        while cgroup.resident_bytes({ours.pid}) <= 1 << 20 and time.monotonic() < end:
            time.sleep(0.05)
        assert "sleep" not in cgroup.stuck({4194303})
        assert f"process {ours.pid}" in cgroup.stuck({ours.pid})
        assert cgroup.resident_bytes({ours.pid, 4194303}) > 1 << 20
    finally:
        ours.kill()
        ours.wait()


def test_a_hierarchy_that_does_not_list_this_process_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cgroup, "_ROOTS", (str(tmp_path),))
    with pytest.raises(cgroup.NoCgroupError):
        cgroup.find_root("/system.slice/x.service")
    group = tmp_path / "system.slice" / "x.service"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert cgroup.find_root("/system.slice/x.service") == tmp_path


@pytest.mark.parametrize(
    ("shown", "code", "end"),
    [
        (unit.Shown(0.0, code="1", status="0", result="success"), 0, "exited with code 0"),
        (unit.Shown(0.0, code="1", status="1", result="exit-code"), 1, "exited with code 1"),
        (unit.Shown(0.0, code="2", status="9", result="signal"), -9, "killed by signal 9"),
        (unit.Shown(0.0, code="2", status="9", result="oom-kill"), -9, "the kernel killed it for want of memory (OOM)"),
        (
            unit.Shown(0.0, code="0", status="0", result="exit-code"),
            0,
            "its start was refused, see the journal of its unit",
        ),
        (unit.Shown(0.0), None, ""),
    ],
)
def test_an_end_is_told_in_words(shown: unit.Shown, code: int | None, end: str) -> None:
    assert unit._code(shown) == code
    assert unit._end(shown) == end


@pytest.mark.parametrize(
    ("job", "active", "busy"),
    [
        ("", "inactive", False),
        ("0", "failed", False),
        ("17", "inactive", True),
        ("", "activating", True),
        ("", "deactivating", True),
        ("", "active", False),
    ],
)
def test_a_unit_with_a_job_is_not_settled(job: str, active: str, busy: bool) -> None:
    assert unit.Shown(0.0, job=job, active=active).busy is busy


def test_an_address_that_is_not_here_is_an_obstacle() -> None:
    assert ready._bindable("127.0.0.1", 0)
    assert not ready._bindable("192.0.2.77", 0)


# Journals.


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=12) ERROR 11-29 19:12:12 [async_llm.py:1] EngineDeadError: EngineCore encountered an issue.",
        "(EngineCore_DP0 pid=1) ERROR 11-29 19:12:12 [core.py:7] EngineCore encountered a fatal error.",
        "ERROR 11-29 19:12:12 [multiproc_executor.py:3] WorkerProc initialization failed due to an exception",
        "(APIServer pid=12) ERROR 11-29 19:12:12 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: Engine",
        "(EngineCore pid=3952) ERROR 11-29 21:23:32 [core.py:1510] Exception: WorkerProc initialization failed due to",
        "ERROR 11-30 01:46:42 [multiproc_executor.py:9] RuntimeError: [/p.cc:5] Connection closed by peer [1",
        "ERROR 11-29 19:12:12 [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly (exit code: -9)",
        "(APIServer pid=3) ERROR 11-29 19:12:12 [v1/engine/core_client.py:1] Engine core proc EngineCore_DP0 died",
    ],
)
def test_a_dead_engine_is_read_from_vllms_own_error_lines(line: str) -> None:
    assert journal.death(line).startswith("its log says: ")


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-29 19:12:12 [logger.py:1] Received request: prompt: 'ERROR 11-29 19:12:12 EngineDeadError'",
        "EngineDeadError",
        "ERROR 11-29 19:12:12 [serving.py:1] Error in preprocessing prompt inputs",
        # vLLM tells as an error which model a client asked for, and a client may ask for any.
        "ERROR 11-30 12:00:00 [serving.py:274] Error with model The model `EngineDeadError` does not",
        "(APIServer pid=12) ERROR 11-30 12:00:00 [serving.py:274] EngineDeadError",
        "(EngineCore pid=3) ERROR 11-30 12:00:00 [core.py:2056] ValueError: no grammar: Worker proc x died",
        "",
    ],
)
def test_what_a_request_says_ends_no_gang(line: str) -> None:
    assert journal.death(line) == ""


def test_of_a_long_journal_only_the_end_is_held() -> None:
    script = "import sys\nfor number in range(200): sys.stdout.write(str(number % 10) * 50_000)"
    tracemalloc.start()
    end = journal.last_bytes([sys.executable, "-c", script], 60_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert end == b"8" * 10_000 + b"9" * 50_000
    assert most < 1_000_000
    with pytest.raises(subprocess.CalledProcessError):
        journal.last_bytes([sys.executable, "-c", "raise SystemExit(3)"], 10)


def test_the_first_failure_of_a_series_outlives_later_ones() -> None:
    names = [journal.folder_name(GenerationId(number, 5)) for number in range(1, 9)]
    first = GenerationId(2, 5)
    gone = journal.to_remove([*names, "notes of an operator"], first)
    assert gone == [names[0], *names[2:4]]
    assert journal.to_remove(names, NONE) == names[:4]


def test_a_folder_that_is_a_link_or_not_ours_is_not_written_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "failures").symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"."), journal._own_folder(tmp_path, "failures"):
        pass
    assert list(elsewhere.iterdir()) == []


# The engine's API.


class _Api(BaseHTTPRequestHandler):
    counter = 5.0
    fail = False
    models = b'{"data": [{"id": "m", "max_model_len": 100}]}'
    asked: list[dict[str, object]]

    models_asked = 0

    def do_GET(self) -> None:
        type(self).models_asked += self.path == "/v1/models"
        bodies = {
            "/health": b"",
            "/metrics": b'# HELP x\nvllm:iteration_tokens_total_count{engine="0"} %g\nvllm:other 1\n'
            % type(self).counter,
            "/v1/models": type(self).models,
        }
        self._reply(200, bodies[self.path])

    def do_POST(self) -> None:
        type(self).asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._reply(500 if type(self).fail else 200, b"{}")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def api() -> Iterator[int]:
    _Api.asked = []
    _Api.models_asked = 0
    _Api.fail = False
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def _wait(what: str, seconds: float, holds: object) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_the_api_is_watched_and_a_canary_proves_a_full_prefill(api: int) -> None:
    watch = engine.Engine()
    watch.interval = 0.1
    watch.watch(engine.Target("127.0.0.1", api, "m", 64))
    counters: list[float | None] = []

    def healthy() -> bool:
        sight = watch.sight()
        counters.append(sight.counter)
        return sight.healthy

    _wait("the API was never healthy", 5.0, healthy)
    assert 5.0 in counters
    watch.canary(1, full_size=True)
    _wait("no canary came back", 5.0, lambda: watch.sight().canary_id == 1)
    prompt = _Api.asked[0]["prompt"]
    assert isinstance(prompt, list)
    assert len(prompt) == 64
    assert _Api.asked[0]["max_tokens"] == 1
    watch.watch(None)
    assert not watch.sight().healthy


def test_a_canary_that_is_refused_is_tried_again_and_proves_nothing(api: int) -> None:
    _Api.fail = True
    watch = engine.Engine()
    watch.watch(engine.Target("127.0.0.1", api, "m"))
    watch.canary(1, full_size=False)
    _wait("the canary was not repeated", 6.0, lambda: len(_Api.asked) >= 2)
    assert watch.sight().canary_id == 0
    _Api.fail = False
    _wait("the canary did not come back", 6.0, lambda: watch.sight().canary_id == 1)


@pytest.mark.parametrize(
    "models",
    [b'{"error": "x"}', b"[]", b'{"data": [1]}', b'{"data": [{"max_model_len": 1e999}]}', b"[" * 100_000],
)
def test_what_the_api_says_of_its_models_ends_no_thread(
    api: int, models: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    monkeypatch.setattr(_Api, "models", models)
    watch = engine.Engine()
    watch.watch(engine.Target("127.0.0.1", api, "m"))
    watch.canary(1, full_size=True)
    _wait("the canary was not repeated", 9.0, lambda: ended or _Api.models_asked >= 2)
    assert not ended
    monkeypatch.setattr(_Api, "models", b'{"data": [{"max_model_len": 100}]}')
    _wait("the canary did not come back", 6.0, lambda: watch.sight().canary_id == 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"vllm:iteration_tokens_total_count 3.0\n", 3.0),
        (b'vllm:iteration_tokens_total_count{a="b"} 3\nvllm:iteration_tokens_total_count{a="c"} 4\n', 7.0),
        (b"vllm:iteration_tokens_total_sum 3\n", None),
        (b"vllm:iteration_tokens_total_count x\n", None),
        (b"", None),
    ],
)
def test_the_counter_is_read_from_prometheus_text(text: bytes, value: float | None) -> None:
    assert engine.read_counter(text) == value


# What others are told.


def test_metrics_are_well_formed_and_healthz_says_why_not() -> None:
    local = Local(Identity("c", "p", "a", "machine-a", "boot-a"), salt=1)
    settings = Settings()
    state = core_module.begin(local, 0.0, settings)
    text = metrics.prometheus(state, local, 1.0, settings)
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('{pipeline="p",node="a"' in line for line in samples)
    assert sum(float(line.rsplit(" ", 1)[1]) for line in samples if line.startswith("ppdeploy_gang_phase")) == 1.0
    assert metrics.why_unhealthy(state, 1.0, settings) == "worker: the API is on the head"
    json.dumps(metrics.status(state, local, 1.0, settings))


# The one file.


def test_the_one_file_is_the_same_each_time_and_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    write(path)
    first = path.stat().st_mtime_ns
    write(path)
    assert path.stat().st_mtime_ns == first
    assert hashlib.sha256(agent_pyz()).digest() == hashlib.sha256(path.read_bytes()).digest()
    done = subprocess.run(
        [sys.executable, "-I", str(path), "--config", str(tmp_path / "none"), "status"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("ppdeploy-agent: the agent's configuration cannot be read")
    assert "Traceback" not in done.stderr


def _modules() -> list[tuple[str, ast.Module]]:
    return [(path.name, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(AGENT.glob("*.py"))]


def test_the_agent_needs_nothing_but_python() -> None:
    for name, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [node.module or ""]
            else:
                continue
            for module in found:
                top = module.split(".")[0]
                assert module.startswith("ppdeploy.agent") or top in sys.stdlib_module_names, f"{name}: {module}"


def test_the_agent_never_reads_the_wall_clock() -> None:
    banned = {"time", "time_ns", "localtime", "gmtime", "strftime", "ctime", "CLOCK_REALTIME", "now", "utcnow", "today"}
    for name, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                where = f"{name}:{node.lineno}: {node.value.id}.{node.attr}"
                assert not (node.value.id == "time" and node.attr in banned), where
                assert node.value.id not in {"datetime", "date"}, where
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert "datetime" not in names, name


def test_the_agents_syntax_is_that_of_python_3_9() -> None:
    for path in sorted(AGENT.glob("*.py")):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


# The fence.


def _fence(tmp_path: Path, beat: str | None, *, active: bool = True, woken: bool = False) -> str:
    environment = Environment(  # noqa: S701  (a shell script, not HTML)
        loader=FileSystemLoader(data_root() / "templates"), undefined=StrictUndefined, trim_blocks=True,
    )  # fmt: skip
    values = {"managed": "x", "fence_seconds": 60, "rank_unit": "ppdeploy-rank@p.service", "run_folder": str(tmp_path)}
    script = tmp_path / "fence.sh"
    script.write_text(environment.get_template("ppdeploy-fence.sh.j2").render(node=values))
    tool = tmp_path / "systemctl"
    tool.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ "$1" != is-active ] || exit {0 if active else 3}\n')
    pause = tmp_path / "sleep"
    pause.write_text(f"#!/bin/sh\n{f'printf {_uptime()} >{tmp_path}/heartbeat' if woken else ':'}\n")
    for program in (tool, pause):
        program.chmod(0o755)
    if beat is not None:
        (tmp_path / "heartbeat").write_text(beat)
    done = subprocess.run(
        ["sh", str(script)], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    calls = tmp_path / "calls"
    return calls.read_text() if calls.exists() else ""


def _uptime() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME))


def test_the_fence_leaves_a_rank_with_a_living_agent_alone(tmp_path: Path) -> None:
    assert _fence(tmp_path, str(_uptime() - 5)) == ""


@pytest.mark.parametrize("beat", [None, "", "garbage", "stale"])
def test_the_fence_ends_a_rank_whose_agent_is_gone(tmp_path: Path, beat: str | None) -> None:
    assert _uptime() > 61, "this machine was booted a minute ago"
    beat = str(_uptime() - 61) if beat == "stale" else beat
    assert "kill --signal=SIGKILL ppdeploy-rank@p.service" in _fence(tmp_path, beat)


def test_the_fence_waits_for_the_heartbeat_of_an_agent_that_woke_with_its_machine(tmp_path: Path) -> None:
    assert "kill" not in _fence(tmp_path, str(_uptime() - 600), woken=True)


def test_the_fence_has_nothing_to_do_without_a_rank(tmp_path: Path) -> None:
    assert "kill" not in _fence(tmp_path, None, active=False)


# Configuration.

_VALUES = {
    "cluster": "c", "pipeline": "p", "node": "a", "listen": [["192.0.2.1", 29500]], "port": 29500, "device": "cpu",
    "settings": {"budget": 9, "lease": 7},
}  # fmt: skip


def test_the_configuration_has_its_defaults_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(_VALUES))
    found = config.load(path)
    assert (found.settings.budget, found.settings.lease, found.settings.stall) == (9, 7.0, 15.0)
    assert found.unit == "ppdeploy-rank@p.service"
    assert str(found.releases) == "/opt/ppdeploy/p/releases"


def test_a_pipeline_of_one_node_listens_on_loopback_once(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({**_VALUES, "listen": [["127.0.0.1", 29500], ["127.0.0.1", 29500]]}))
    assert config.load(path).listen == (("127.0.0.1", 29500),)


def test_two_pipelines_share_no_record_and_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(_VALUES))
    one = config.load(path)
    path.write_text(json.dumps({**_VALUES, "pipeline": "q"}))
    other = config.load(path)
    assert {one.record, one.memory}.isdisjoint({other.record, other.memory})


@pytest.mark.parametrize(
    "change",
    [{"settings": {"buget": 1}}, {"settings": {"budget": "x"}}, {"listen": [1]}, {"port": "x"}, {"settings": 3}],
)
def test_a_wrong_configuration_is_one_sentence(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({**_VALUES, **change}))
    with pytest.raises(config.ConfigError, match="run apply"):
        config.load(path)


def test_an_order_is_left_and_a_missing_ticket_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({**_VALUES, "state": str(tmp_path), "run": str(tmp_path)}))
    assert main.main(["--config", str(path), "order", "start", "--release", "abc", "--forget", "b"]) == 0
    assert json.loads(capsys.readouterr().out) == {"serial": 1, "verb": "start"}
    assert main.main(["--config", str(path), "ticket"]) == 1
    assert "only the agent starts it" in capsys.readouterr().err
    assert main.main(["--config", str(path), "rank", "p", "--", "vllm", "serve"]) == 1
    assert "no consumed ticket" in capsys.readouterr().err
