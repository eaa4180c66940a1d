"""What the inventory says, typed and checked: the first step from an inventory to a served model.

    inventory -> spec -> facts -> plan -> ...

The only thing here that starts a process is `load_inventory` (ansible-inventory); all else is pure.
"""

from __future__ import annotations

from ppdeploy.spec.build import example_problems, spec_from_values
from ppdeploy.spec.inventory import Inventory, load_inventory
from ppdeploy.spec.problems import Problem, raise_problems
from ppdeploy.spec.types import BundledDriver, GatewayHost, HostSpec, PipelineSpec, Spec, Wheelhouse
from ppdeploy.spec.variables import (
    VARIABLES,
    HostVars,
    PipelineVars,
    Sidecar,
    Variable,
    is_ip_address,
    is_local_model,
    is_mirror,
    known_variable_names,
    secret_variable_names,
)

__all__ = [
    "VARIABLES",
    "BundledDriver",
    "GatewayHost",
    "HostSpec",
    "HostVars",
    "Inventory",
    "PipelineSpec",
    "PipelineVars",
    "Problem",
    "Sidecar",
    "Spec",
    "Variable",
    "Wheelhouse",
    "example_problems",
    "is_ip_address",
    "is_local_model",
    "is_mirror",
    "known_variable_names",
    "load_inventory",
    "raise_problems",
    "secret_variable_names",
    "spec_from_values",
]
