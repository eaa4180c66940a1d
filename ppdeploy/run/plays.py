"""Names in playbooks/ that the command line relies on; a test compares them with the playbooks themselves."""

from __future__ import annotations

SITE = "site.yml"
FACTS = "playbooks/facts.yml"
SMOKE = "playbooks/smoke.yml"
STATUS = "playbooks/status.yml"
LOGS = "playbooks/logs.yml"
CHECK = "playbooks/check.yml"
KEYS = "playbooks/keys.yml"
MODELS = "playbooks/models.yml"
NET = "playbooks/net.yml"
NET_STOP = "playbooks/net_stop.yml"
BENCH = "playbooks/bench.yml"
BENCH_STOP = "playbooks/bench_stop.yml"

#: Task whose result is what `ppdeploy_facts` returned.
FACTS_TASK = "Ask every node for its facts"
#: Tasks in which the play reads the inventory and plans: what fails there is told without host and task.
VALUES_TASK = "Take the inventory's ppdeploy values"
PLAN_TASK = "Plan every pipeline"
DRIVER_TASK = "Decide on every node's driver"
GANG_TASK = "Ask every node how its gang is"
#: What names the gateways outside of all pipelines; and for `keys`, every gateway.
OUTSIDE_TASK = "Name the gateways outside of all pipelines"
GATEWAYS_TASK = "Name every gateway"
PLANNING_TASKS = frozenset({VALUES_TASK, FACTS_TASK, DRIVER_TASK, PLAN_TASK, GANG_TASK, OUTSIDE_TASK, GATEWAYS_TASK})

#: Tasks of `start`, `stop` and `restart` whose results say what became of the operator's word.
ORDER_TASK = "Leave the operator's word for the agent"
SERVING_TASK = "Wait until the gang serves"
STOPPED_TASK = "Wait until no rank is left"
#: Fails where a pipeline that was started does not serve.
SERVES_NOT_TASK = "Fail where the gang does not serve"
#: Fails where a benchmark could not be made, or a request of it failed.
BENCH_FAILED_TASK = "Fail where a benchmark failed"
#: Failures of these tasks mean that the hosts are set up and the pipeline does not serve as it should.
SERVING_TASKS = frozenset({SERVES_NOT_TASK, BENCH_FAILED_TASK})

JOURNAL_TASK = "Read every node's journal"
MODELS_TASK = "Look after the models"

#: Tasks of `check`: a node listens for its peers, and looks at them.
LISTEN_TASK = "Listen for the peers"
PROBE_TASK = "Look at every peer"
#: Task of `keys` that says which gateways know the keys.
KEYS_TASK = "Tell the gateway which API keys there are"
#: Tasks whose results the verbs read.
KEPT_TASKS = (
    *(FACTS_TASK, GANG_TASK, ORDER_TASK, SERVING_TASK, STOPPED_TASK, JOURNAL_TASK, MODELS_TASK),
    *(LISTEN_TASK, PROBE_TASK, KEYS_TASK),
)

#: Play in which a failure means that the hosts are set up and the pipeline does not serve.
SMOKE_PLAY = "Ask every pipeline for completions"

#: Role whose failures are checks that ran before any change, and the tag that runs it alone.
CHECK_ROLE = "preflight"

#: What the verbs on a running gang hand to their plays: nodes to forget, and whether to wait for the outcome.
FORGET = "ppdeploy__forget"
WAIT = "ppdeploy__wait"
#: What is done with the model folders, and with which.
MODELS_ASK = "ppdeploy__models"
#: Whether the play of `check` judges and prints what it saw; and when the facts came, which it sets.
TELL = "ppdeploy__tell"
RECEIVED = "ppdeploy__received"
#: What a benchmark is asked for, and whether the play itself shows what it came to.
BENCH_ASK = "ppdeploy__bench"
SHOW = "ppdeploy__show"

#: What the plays set with `set_fact`: each host's inventory values, the plan, the smoke test's reports.
VALUES = "ppdeploy__values"
PLAN = "ppdeploy__plan"
SMOKE_REPORTS = "ppdeploy__smoke"
BENCHES = "ppdeploy__benches"
#: Set on the head of a pipeline that went back to its last release: whether that one serves again.
SERVES_AGAIN = "ppdeploy__serves_again"

#: What `net` hands to its play: seconds of a run, whether to disturb what serves, whether the play prints a report.
NET_SECONDS = "ppdeploy__net_seconds"
NET_FORCE = "ppdeploy__net_force"
NET_SHOW = "ppdeploy__net_show"
#: What the play judged, set with `set_fact`.
NET_FOUND = "ppdeploy__net"
