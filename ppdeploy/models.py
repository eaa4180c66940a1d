"""The model folders of a cluster's nodes, as `plugins/modules/ppdeploy_models.py` told them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class KeptModel(BaseModel):
    """A model folder of a node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    name: str
    bytes: int = Field(description="on the disk")
    needed_by: tuple[str, ...] = Field(description="what needs it; nothing: it may be removed")
    damaged: tuple[str, ...] = Field(default=(), description="files that are not what its record says")

    def sentence(self) -> str:
        """Return what is wrong with a damaged one, where, and what to do."""
        return (
            f"{', '.join(self.damaged)} of model {self.name} is not what was placed ({self.host}): "
            "see to the disk's health, and run `ppdeploy apply`, which fetches it anew"
        )


def kept_models(told: Mapping[str, Mapping[str, Any]]) -> list[KeptModel]:
    """Return the folders of all hosts; `told` has what the module returned on each host."""
    return [KeptModel(host=host, **one) for host, result in told.items() for one in result.get("models", ())]
