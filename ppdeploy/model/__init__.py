"""The shape of a checkpoint: what a plan must know of a model to split and size it, from its configuration alone.

`parse_config` reads a config.json. Model families that are known matrix by matrix (`families`, `towers`) give exact
sizes with any quantisation that is known (`quantisation`); any other model is estimated, and says so in `note`. Where
weight files or their index are at hand, their sizes win (`checkpoint`).
"""

from ppdeploy.model.checkpoint import Tensor, tensors_of
from ppdeploy.model.config import parse_json
from ppdeploy.model.loading import SYNONYMS, Loading
from ppdeploy.model.read import parse_config
from ppdeploy.model.shape import Attention, Layer, ModelShape, Vision

__all__ = [
    "SYNONYMS",
    "Attention",
    "Layer",
    "Loading",
    "ModelShape",
    "Tensor",
    "Vision",
    "parse_config",
    "parse_json",
    "tensors_of",
]
