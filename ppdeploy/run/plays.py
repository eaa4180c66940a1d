"""Names in playbooks/ that the command line relies on; a test compares them with the playbooks themselves."""

from __future__ import annotations

SITE = "site.yml"
FACTS = "playbooks/facts.yml"
SMOKE = "playbooks/smoke.yml"

#: Task whose result is what `ppdeploy_facts` returned.
FACTS_TASK = "Ask every node for its facts"
#: Tasks in which the play reads the inventory and plans: what fails there is told without host and task.
VALUES_TASK = "Take the inventory's ppdeploy values"
PLAN_TASK = "Plan every pipeline"
PLANNING_TASKS = frozenset({VALUES_TASK, FACTS_TASK, PLAN_TASK})

#: Play in which a failure means that the hosts are set up and the pipeline does not serve.
SMOKE_PLAY = "Ask every pipeline for completions"

#: Role whose failures are checks that ran before any change, and the tag that runs it alone.
CHECK_ROLE = "preflight"

#: What the plays set with `set_fact`: each host's inventory values, the plan, the smoke test's reports.
VALUES = "ppdeploy__values"
PLAN = "ppdeploy__plan"
SMOKE_REPORTS = "ppdeploy__smoke"
#: Set on the head of a pipeline that went back to its last release: whether that one serves again.
SERVES_AGAIN = "ppdeploy__serves_again"
