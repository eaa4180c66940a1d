"""Every decision: layout, fabric, command lines, rules and checks, from spec and facts, in pure typed Python."""

from ppdeploy.plan.bench import BenchRun
from ppdeploy.plan.build import build_plan, facts_request, gateway_facts_request, speed_models
from ppdeploy.plan.types import Fabric, Finding, NodePlan, PipelinePlan, Plan, Stage

__all__ = [
    "BenchRun",
    "Fabric",
    "Finding",
    "NodePlan",
    "PipelinePlan",
    "Plan",
    "Stage",
    "build_plan",
    "facts_request",
    "gateway_facts_request",
    "speed_models",
]
