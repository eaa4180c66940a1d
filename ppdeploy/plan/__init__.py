"""Every decision: layout, fabric, command lines, rules and checks, from spec and facts, in pure typed Python."""

from ppdeploy.plan.build import build_plan, facts_request
from ppdeploy.plan.types import Fabric, Finding, NodePlan, PipelinePlan, Plan, Stage

__all__ = ["Fabric", "Finding", "NodePlan", "PipelinePlan", "Plan", "Stage", "build_plan", "facts_request"]
