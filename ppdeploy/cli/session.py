"""What a verb works with once its options are read: a checked inventory, passwords, and a way to run a playbook."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppdeploy.benches import read_benches
from ppdeploy.cli.options import Request
from ppdeploy.errors import InputError, PpdeployError
from ppdeploy.facts import NodeFacts
from ppdeploy.plan import PipelinePlan, Plan
from ppdeploy.play import make_plan, resolve_models, spec_of_play, whole_pipelines, with_wheelhouses
from ppdeploy.run import (
    Passwords,
    PlayOptions,
    Progress,
    Redactor,
    RunResult,
    ask_passwords,
    plays,
    run_playbook,
)
from ppdeploy.run.sentences import failure_sentence
from ppdeploy.spec import Inventory, Spec, load_inventory, secret_variable_names
from ppdeploy.what_if import Case


@dataclass(frozen=True)
class Session:
    """A cluster at hand. `secrets` are the inventory's own, by name, as far as this machine can read them."""

    inventory: Inventory
    spec: Spec
    options: PlayOptions
    passwords: Passwords
    redactor: Redactor
    secrets: Mapping[str, str]
    as_json: bool

    def run(
        self,
        playbook: str,
        *,
        events: bool = False,
        values: Mapping[str, Any] | None = None,
        display: Progress | None = None,
    ) -> RunResult:
        """Run a playbook.

        `events` says whether, with --json, its steps are part of what the verb prints; `values` are the play's own
        variables (`ppdeploy__...`), and `display` shows its progress instead of the usual one.
        """
        options = self.options
        if values:
            options = replace(options, extra_vars=(*options.extra_vars, json.dumps(values)))
        return run_playbook(
            playbook,
            inventory=self.inventory.path,
            options=options,
            display=display,
            passwords=self.passwords,
            redactor=self.redactor,
            json_events=self.as_json and events,
            addresses={host: str(address) for host, address in self.inventory.addresses.items()},
            keep=plays.KEPT_TASKS,
        )

    def check_models(self) -> None:
        """Refuse a model folder that cannot be served before any host is asked."""
        if self.options.limit:
            return
        local = [p for p in self.spec.pipelines if p.model_is_local and "ppdeploy_model" not in p.pending]
        resolve_models(self.spec.model_copy(update={"pipelines": tuple(local)}))

    def take_facts(self) -> RunResult:
        """Ask the nodes for their facts, changing nothing; raises when one cannot answer."""
        result = self.run(plays.FACTS)
        result.raise_for_status()
        return result

    def plan_from_play(self, result: RunResult) -> Plan:
        """Return the plan that follows from what a play read: each host's values and facts."""
        return plan_of(self.case_from_play(result))

    def case_from_play(self, result: RunResult) -> Case:
        """Return all that the plan is made of, from what a play read."""
        values = {host: facts[plays.VALUES] for host, facts in result.facts.items() if plays.VALUES in facts}
        spec = spec_of_play(
            {
                "pipelines": self.inventory.pipelines,
                "hosts": list(values),
                "values": values,
                "directory": str(self.inventory.directory),
                "gateways": self.inventory.gateway_values(),
            }
        )
        return self.case(spec, typed_facts(result))

    def case_from_facts(self, facts: Mapping[str, NodeFacts], assumed: tuple[str, ...] = ()) -> Case:
        """Return all that the plan is made of, from facts of a file; `assumed` are the hosts that nobody asked."""
        missing = [host.name for pipeline in self.spec.pipelines for host in pipeline.hosts if host.name not in facts]
        if missing:
            raise InputError(
                f"the facts of {', '.join(missing)} are not in the file, which holds {', '.join(facts) or 'none'}",
                where="--facts",
                remedy="add a line for each host to a file written by hand, or save the facts anew with --save-facts",
            )
        pending = sorted({name for pipeline in self.spec.pipelines for name in pipeline.pending})
        if pending:
            raise InputError(
                f"only a play can read {', '.join(pending)}",
                where=str(self.inventory.path),
                remedy="leave --facts out, or give these variables plain values",
            )
        return self.case(with_wheelhouses(self.spec), facts, assumed)

    def case(self, spec: Spec, facts: Mapping[str, NodeFacts], assumed: tuple[str, ...] = ()) -> Case:
        """Return the case of the pipelines whose hosts all have facts."""
        members = {pipeline.name: [host.name for host in pipeline.hosts] for pipeline in spec.pipelines}
        chosen = whole_pipelines(members, facts)
        spec = spec.only(chosen)
        models = resolve_models(spec, self.secrets.get("ppdeploy_hf_token"))
        return Case(spec, facts, models, assumed=assumed, benches=read_benches(spec.inventory_dir))

    def unreachable_reason(self, host: str, result: Mapping[str, Any]) -> str:
        """Return in a sentence why a host could not be asked; `result` is what Ansible says of it."""
        address = str(self.inventory.addresses.get(host, host))
        _, sentence = failure_sentence(host, address, result, unreachable=bool(result.get("unreachable")))
        return self.redactor.text(sentence)

    def error_of(self, result: RunResult) -> PpdeployError | None:
        """Return a run's error. One of planning is found again here, for its type: a play has only its text."""
        error = result.error()
        if error and result.failures and all(failure.is_planning for failure in result.failures):
            try:
                self.plan_from_play(result)
            except PpdeployError as typed:
                return typed
        return error


def plan_of(case: Case, *, curves: bool = False) -> Plan:
    """Return the plan of a case; with `curves`, what drawings show of its speed as well."""
    plan = make_plan(
        case.spec,
        case.facts,
        case.models,
        latency_seconds=case.latency_seconds,
        curves=curves,
        benches=case.benches,
    )
    assumed = tuple(host for host in case.assumed if any(host in _hosts(one) for one in plan.pipelines))
    return plan.model_copy(update={"assumed": assumed}) if assumed else plan


def _hosts(pipeline: PipelinePlan) -> set[str]:
    return {node.host for node in pipeline.nodes}


def typed_facts(result: RunResult) -> dict[str, NodeFacts]:
    """Return the facts of every host that a run asked."""
    return {host: NodeFacts.from_module(host, raw) for host, raw in result.results.get(plays.FACTS_TASK, {}).items()}


def open_session(request: Request, *, any_address: bool = False) -> Session:
    """Ask for passwords, then read and check the inventory; nothing of it touches a host.

    `any_address` accepts the addresses of the example, for what never will.
    """
    options = request.options
    passwords = ask_passwords(become=request.ask_become_pass, vault=options.vault)
    with passwords.vault_arguments() as asked:
        inventory = load_inventory(
            request.inventory,
            vault_args=[*options.vault.arguments(), *asked],
            extra_vars=options.extra_vars,
            any_address=any_address,
        )
    secrets = _secrets(inventory.values)
    return Session(
        inventory=inventory,
        spec=inventory.spec(),
        options=options,
        passwords=passwords,
        redactor=Redactor([*passwords.values(), *secrets.values()]),
        secrets=secrets,
        as_json=request.as_json,
    )


def _secrets(values: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the secrets of the inventory by name; a cluster has one value for each."""
    names = secret_variable_names()
    return {name: str(value) for own in values.values() for name, value in own.items() if name in names and value}
