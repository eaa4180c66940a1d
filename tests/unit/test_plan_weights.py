"""Which files of a model each node gets: those of its own layers and ends, and rather too much than too little."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ppdeploy.facts import NodeFacts
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.model.places import FilePlace, file_places
from ppdeploy.plan.types import PipelinePlan
from ppdeploy.plan_report import plan_report
from ppdeploy.play import model_slice
from ppdeploy.sources import ModelSource, resolve_source
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan, make_pipeline

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path / "cache"))


def sharded(tmp_path: Path, **options: Any) -> ModelSource:
    """A model of four layers: files 1 to 4 are the layers, 5 is the embedding, 6 norm and head."""
    folder = make_tiny_model(tmp_path / "model", sharded=True, **options)
    return resolve_source(str(folder), None, tmp_path)


def planned(source: ModelSource, facts: dict[str, NodeFacts] | None = None, **wants: Any) -> PipelinePlan:
    return make_pipeline(source=source, facts=facts or make_cluster(2), **wants)


def shards(plan: PipelinePlan) -> list[set[int]]:
    """The numbers of the weight files of each node."""
    files = [node.model.files for node in plan.nodes]
    assert files[0] is None
    return [{int(name[6:11]) for name in mine or () if name.startswith("model-")} for mine in files]


def test_the_head_has_all_and_the_others_what_is_theirs(tmp_path: Path) -> None:
    plan = planned(sharded(tmp_path))
    assert plan.partition == (2, 2)
    assert shards(plan) == [set(), {3, 4, 6}]
    head, worker = plan.nodes
    assert head.model.manifest_digest == plan.model.manifest_digest != worker.model.manifest_digest
    assert head.model.directory != worker.model.directory
    assert worker.argv[2] == worker.model.directory
    assert worker.model.bytes < 0.6 * head.model.bytes
    # Everything that is no weights is there, the index too.
    assert {"config.json", "tokenizer.json", INDEX} <= set(worker.model.files or ())


def test_a_stage_in_the_middle_has_neither_end(tmp_path: Path) -> None:
    plan = planned(sharded(tmp_path), make_cluster(3), layer_partition=[1, 2, 1])
    assert shards(plan) == [set(), {2, 3}, {4, 6}]


def test_the_last_stage_has_the_embedding_where_the_head_is_the_embedding(tmp_path: Path) -> None:
    assert shards(planned(sharded(tmp_path, tied=True))) == [set(), {3, 4, 5, 6}]


@pytest.mark.parametrize(
    "wants",
    [
        {"weights": "full"},
        # What finds its files in another way than by the index.
        {"vllm_args": {"load-format": "sharded_state"}},
    ],
)
def test_all_nodes_have_all_files_where_it_is_asked_for_or_not_known_to_work(
    tmp_path: Path, wants: dict[str, Any]
) -> None:
    plan = planned(sharded(tmp_path), **wants)
    assert {node.model.files for node in plan.nodes} == {None}
    assert {node.model.directory for node in plan.nodes} == {plan.nodes[0].model.directory}


def test_a_model_of_one_file_is_whole_everywhere(tmp_path: Path) -> None:
    source = resolve_source(str(make_tiny_model(tmp_path / "one")), None, tmp_path)
    assert {node.model.files for node in planned(source).nodes} == {None}


def test_the_plan_says_who_gets_how_much(tmp_path: Path) -> None:
    source = sharded(tmp_path, hidden=1024)
    console = Console(file=io.StringIO(), width=200)
    for part in plan_report(make_complete_plan(source=source)):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    assert "files of their own layers alone, 43.1 MiB of 86.1 MiB, on node2" in console.file.getvalue()


def test_another_split_is_another_release(tmp_path: Path) -> None:
    source = sharded(tmp_path)
    plans = [planned(source, layer_partition=split) for split in ([2, 2], [1, 3])]
    assert plans[0].release != plans[1].release
    assert plans[0].nodes[0].model == plans[1].nodes[0].model
    assert plans[0].nodes[1].model != plans[1].nodes[1].model


def test_the_role_takes_from_the_head_only_what_a_node_is_to_have(tmp_path: Path) -> None:
    source = sharded(tmp_path)
    plan = planned(source)
    head, worker = (model_slice(plan, node, source) for node in plan.nodes)
    assert (head["source_here"], worker["source_here"]) == (True, False)
    assert head["peers"] == [plan.nodes[1].fabric.address]
    assert worker["source_address"] == plan.nodes[0].fabric.address
    assert len(head["manifest"]) == len(source.manifest.files)
    assert tuple(file["path"] for file in worker["manifest"]) == plan.nodes[1].model.files


def test_a_node_with_a_part_never_hands_it_on(tmp_path: Path) -> None:
    """The worker has its part already, the head has nothing: it is the head that gets the model."""
    source = sharded(tmp_path)
    plan = planned(source)
    work = plan.nodes[1].work.model_copy(update={"place_model": False})
    nodes = (plan.nodes[0], plan.nodes[1].model_copy(update={"work": work}))
    plan = plan.model_copy(update={"nodes": nodes})
    head, worker = (model_slice(plan, node, source) for node in plan.nodes)
    assert (head["source_here"], head["peers"], worker["source_here"]) == (True, [], False)


def chained(plan: PipelinePlan, source: ModelSource) -> dict[str, dict[str, Any]]:
    return {node.host: model_slice(plan, node, source) for node in plan.nodes}


def test_every_file_goes_down_the_nodes_that_need_it_one_after_the_other(tmp_path: Path) -> None:
    source = sharded(tmp_path)
    plan = planned(source, make_cluster(3), weights="full")
    one, two, three = (node.fabric.address for node in plan.nodes)
    slices = chained(plan, source)
    every = [file.path for file in source.manifest.files]
    assert slices["node1"]["sources"] == []
    assert slices["node2"]["sources"] == [{"address": one, "paths": every}]
    assert slices["node3"]["sources"] == [{"address": two, "paths": every}]
    # The first node answers all of them, in case that the chain breaks.
    assert (slices["node1"]["peers"], slices["node2"]["peers"], slices["node3"]["peers"]) == ([two, three], [three], [])


def test_what_the_node_before_does_not_need_comes_from_the_head(tmp_path: Path) -> None:
    source = sharded(tmp_path)
    plan = planned(source, make_cluster(3), layer_partition=[1, 2, 1])
    one, two, _ = (node.fabric.address for node in plan.nodes)
    sources = {item["address"]: set(item["paths"]) for item in chained(plan, source)["node3"]["sources"]}
    assert "config.json" in sources[two]
    assert sources[one] == {"model-00004-of-00006.safetensors", "model-00006-of-00006.safetensors"}


def test_from_a_mounted_folder_every_node_helps_itself(tmp_path: Path) -> None:
    source = sharded(tmp_path)
    plan = planned(source)
    for node in plan.nodes:
        told = model_slice(plan, node, source, mounted=True)
        assert (told["kind"], told["path"]) == ("mount", source.location)
        assert (told["source_here"], told["sources"], told["peers"]) == (False, [], [])


# ---- names -----------------------------------------------------------------------------------------------------------


def places(names: dict[str, list[str]], layers: int = 2, *, tied: bool = False) -> dict[str, FilePlace]:
    every = {"base": ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(layers))]}
    return file_places({**every, **names}, layers, tied=tied)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.1.self_attn.q_proj.weight", FilePlace(layers=(1,))),
        ("model.language_model.layers.1.mlp.experts.7.up_proj.weight", FilePlace(layers=(1,))),
        ("language_model.model.embed_tokens.weight", FilePlace(first=True)),
        ("transformer.wte.weight", FilePlace(first=True)),
        ("lm_head.weight", FilePlace(last=True)),
        ("model.norm.weight", FilePlace(last=True)),
        ("model.language_model.norm.weight", FilePlace(last=True)),
        ("transformer.ln_f.bias", FilePlace(last=True)),
        # A vision tower numbers its own layers.
        ("model.visual.blocks.1.attn.qkv.weight", FilePlace(everywhere=True)),
        ("vision_tower.encoder.layers.1.norm.weight", FilePlace(everywhere=True)),
        ("multi_modal_projector.linear_1.weight", FilePlace(everywhere=True)),
        ("model.rotary_emb.inv_freq", FilePlace(everywhere=True)),
        ("something.new", FilePlace(everywhere=True)),
    ],
)
def test_a_tensor_is_needed_where_vllm_has_it(name: str, place: FilePlace) -> None:
    assert places({"file": [name]})["file"] == place


def test_layers_for_multi_token_prediction_and_the_embedding_that_they_share_are_on_the_last_stage_too() -> None:
    for name in ("model.layers.2.eh_proj.weight", "mtp.layers.0.input_layernorm.weight"):
        found = places({"file": [name]})
        assert found["file"].everywhere
        assert (found["base"].first, found["base"].last) == (True, True)


def test_names_that_do_not_fit_the_model_say_nothing() -> None:
    assert file_places({"file": ["model.layers.0.x", "model.embed_tokens.weight"]}, 2, tied=False) == {}
    assert file_places({"file": ["model.layers.0.x", "model.layers.1.x"]}, 2, tied=False) == {}
