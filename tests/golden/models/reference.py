"""Counts of a model's parameters as transformers' own classes have them, without any weights.

Run by itself it rewrites counts.json from the configurations in configs/: `python tests/golden/models/reference.py`,
with the packages of the extra `models` installed.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
CONFIGS = FOLDER / "configs"
COUNTS = FOLDER / "counts.json"

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TOWER = ("visual", "vision_tower", "multi_modal_projector")


def counts(config: dict[str, Any]) -> dict[str, Any]:
    """Build the configuration's model on torch's meta device, which holds no values, and count its parameters.

    Buffers that are saved with the weights count too. Layers come as [how many alike, parameters of each].
    """
    import torch  # noqa: PLC0415  (only where the reference is made)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415  (the same)

    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    if plain["model_type"] == "kimi_k2":  # a name for DeepSeek V3's classes that only its own code knows
        plain["model_type"] = "deepseek_v3"
    built = AutoConfig.for_model(**plain)
    many = "vision_config" in config
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if many else AutoModelForCausalLM).from_config(built)
    saved = frozenset(model.state_dict())
    layers: dict[int, int] = {}
    found = {"embedding": 0, "head": 0, "towers": 0, "rest": 0}
    # These leave out the second name of a shared tensor, which the state dictionary has.
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in saved:
            continue
        if any(part in name for part in _TOWER):
            found["towers"] += tensor.numel()
        elif place := _LAYER.search(name):
            layers[int(place[1])] = layers.get(int(place[1]), 0) + tensor.numel()
        elif re.search(r"(^|\.)(embed_tokens|embeddings)\.", name):
            found["embedding"] += tensor.numel()
        elif "lm_head" in name:
            found["head"] += tensor.numel()
        else:
            found["rest"] += tensor.numel()
    return {
        **found,
        "layers": [[len(list(alike)), each] for each, alike in groupby(layers[i] for i in range(len(layers)))],
        "total": sum(found.values()) + sum(layers.values()),
    }


def main() -> None:
    """Rewrite the kept counts, and say what could not be built."""
    import transformers  # noqa: PLC0415  (only where the reference is made)

    table: dict[str, Any] = {}
    for path in sorted(CONFIGS.glob("*.json")):
        table[path.stem] = counts(json.loads(path.read_text()))
        print(f"{path.stem}: {table[path.stem]['total']}", file=sys.stderr)  # noqa: T201  (a script that tells how far it is)
    # One line for each model, so that a change shows which.
    lines = ",\n".join(f'  "{name}": {json.dumps(value)}' for name, value in table.items())
    head = f' "transformers": {json.dumps(transformers.__version__)},\n "models": {{'
    COUNTS.write_text(f"{{\n{head}\n{lines}\n }}\n}}\n")


if __name__ == "__main__":
    main()
