"""Where a model comes from: folders on the controller and repositories of a (stand-in) hub, good and bad."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.errors import InputError
from ppdeploy.manifest import Manifest, ManifestFile, git_blob_sha1, needed_files
from ppdeploy.model import parse_config
from ppdeploy.sources import ModelSource, resolve_source
from tests.hub_standin import HubStandin, Repository

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def safetensors(content: bytes) -> bytes:
    """Return a safetensors file with one tensor of these bytes."""
    entry = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + content


def write_model(folder: Path, shards: int = 2, **config: Any) -> Path:
    """Write a checkpoint with an index and return its folder."""
    folder.mkdir(parents=True)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(safetensors(bytes([i]) * 4096))
    index = {"metadata": {}, "weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"\0\1\2")
    (folder / "README.md").write_text("not for vLLM")
    return folder


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


@pytest.fixture
def hub(model: Path) -> Iterator[HubStandin]:
    repositories = {
        "org/tiny": Repository(model, revisions=("main", "v1")),
        "org/secret": Repository(model, token="hf_right"),
        "org/gated": Repository(model, token="hf_right", gated=True),
    }
    with HubStandin(repositories) as running:
        yield running


def from_hub(hub: HubStandin, repo: str, revision: str | None = None, token: str | None = None) -> ModelSource:
    return resolve_source(repo, revision, Path(), hub.endpoint, token)


# --- a folder on the controller


def test_folder_gives_shape_and_manifest(model: Path) -> None:
    source = resolve_source("./tiny", None, model.parent)
    assert source.kind == "folder"
    assert source.location == str(model)
    assert source.shape.num_hidden_layers == 4
    assert source.shape.num_key_value_heads == 2
    assert source.shape.dtype == "bfloat16"
    assert source.shape.weight_bytes == sum(p.stat().st_size for p in model.glob("*.safetensors"))
    assert {file.path: file.sha256 for file in source.manifest.files} == {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in model.iterdir() if p.name != "README.md"
    }
    assert source.directory_name() == f"tiny-{source.manifest.digest[:12]}"


def test_digest_is_of_the_content_alone(model: Path, tmp_path: Path) -> None:
    twin = write_model(tmp_path / "elsewhere" / "twin")
    first, second = (resolve_source(str(folder), None, Path()) for folder in (model, twin))
    assert first.manifest.digest == second.manifest.digest
    (twin / "tokenizer.json").write_text('{"a":1}')
    assert resolve_source(str(twin), None, Path()).manifest.digest != first.manifest.digest


def test_files_are_hashed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in model.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    first = resolve_source(str(model), None, Path())
    monkeypatch.setattr("ppdeploy.manifest._sha256", lambda path: pytest.fail(f"hashed {path} again"))
    assert resolve_source(str(model), None, Path()) == first


def test_changed_file_is_hashed_again_even_with_its_old_time(model: Path) -> None:
    weights = model / "model-00001-of-00002.safetensors"
    os.utime(weights, (1_700_000_000, 1_700_000_000))
    first = resolve_source(str(model), None, Path())
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, (1_700_000_000, 1_700_000_000))
    assert resolve_source(str(model), None, Path()).manifest.digest != first.manifest.digest


def test_hub_cache_snapshot_is_followed_and_named_by_its_repository(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--big-one" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    source = resolve_source(str(snapshot), None, Path())
    assert source.name == "big-one"
    assert source.manifest == resolve_source(str(model), None, Path()).manifest


def test_only_what_vllm_reads_is_taken() -> None:
    kept = ["chat_template.jinja", "config.json", "model.safetensors", "modeling_x.py", "sub/extra.json"]
    other = [
        ".git/config.json",
        "README.md",
        "checkpoint-10/config.json",
        "model.gguf",
        "original/params.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "sub/model.safetensors",
        "training_args.bin",
    ]
    assert needed_files(kept + other) == kept
    assert needed_files(["config.json", "pytorch_model.bin", "optimizer.pt"]) == [
        "config.json",
        "pytorch_model.bin",
    ]
    assert "consolidated.safetensors" not in needed_files(
        ["consolidated.safetensors", "model-1.safetensors", "model.safetensors.index.json"]
    )


WEIGHTS = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "absent file": lambda folder: (folder / WEIGHTS).unlink(),
    "truncated": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1]),
    "header cut": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:20]),
    "pointer": lambda folder: (folder / WEIGHTS).write_bytes(POINTER),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config cut": lambda folder: (folder / "config.json").write_text('{"architectures": ["Lla'),
    "config list": lambda folder: (folder / "config.json").write_text("[1]"),
    "config binary": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\0"),
    "no weights": lambda folder: remove_all(folder.glob("*.safetensors*")),
    "bad index": lambda folder: (folder / INDEX).write_text("{}"),
    "odd name": lambda folder: (folder / "a\nb.json").write_text("{}"),
    "dangling link": lambda folder: (folder / "added.json").symlink_to("nowhere"),
}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("absent file", "the index names absent files: model-00002-of-00002.safetensors"),
        ("truncated", "where its header says"),
        ("header cut", "truncated or not in safetensors format"),
        ("pointer", "git lfs pull"),
        ("no config", "has no config.json"),
        ("config cut", "not valid JSON"),
        ("config list", "holds a list, not an object"),
        ("config binary", "not UTF-8"),
        ("no weights", "no weight files"),
        ("bad index", "no weight_map"),
        ("odd name", "cannot be copied safely"),
        ("dangling link", "cannot be read"),
    ],
)
def test_bad_folder_is_one_sentence(model: Path, kind: str, sentence: str) -> None:
    DAMAGE[kind](model)
    with pytest.raises(InputError) as caught:
        resolve_source("./tiny", None, model.parent)
    assert sentence in str(caught.value)
    assert str(model) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_can_run_code_are_refused_unless_allowed(model: Path) -> None:
    (model / "model.safetensors").unlink(missing_ok=True)
    for left in model.glob("model*.safetensors*"):
        left.unlink()
    (model / "pytorch_model.bin").write_bytes(b"never read here")
    with pytest.raises(InputError, match=r"not safetensors \(pytorch_model.bin\).*ppdeploy_allow_pickle_weights: true"):
        resolve_source("./tiny", None, model.parent)


def test_weights_may_be_absent_when_allowed(model: Path) -> None:
    DAMAGE["no weights"](model)
    source = resolve_source("./tiny", None, model.parent, allow_no_weights=True)
    assert source.shape.weight_bytes == 0
    assert [file.path for file in source.manifest.files] == [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
    ]


@pytest.mark.parametrize(
    ("name", "revision", "sentence"),
    [
        ("./absent", None, "does not exist"),
        ("./tiny/config.json", None, "not a folder"),
        ("tiny/a/b", None, "neither a hub repository"),
        ("-x/y", None, "neither a hub repository"),
        ("./tiny", "main", "no revision"),
        ("~nobody-of-this-name/x", None, "home folder"),
    ],
)
def test_bad_model_name_is_one_sentence(model: Path, name: str, revision: str | None, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        resolve_source(name, revision, model.parent)


# --- config.json


def test_nested_text_config_is_read() -> None:
    text = {k: v for k, v in CONFIG.items() if k != "architectures"} | {"num_hidden_layers": 48}
    config = {"architectures": ["XForConditionalGeneration"], "text_config": text, "num_hidden_layers": 7}
    quantized = config | {"quantization_config": {"quant_method": "fp8"}}
    shape = parse_config(json.dumps(quantized).encode(), where="x", weight_bytes=1)
    assert shape.num_hidden_layers == 48
    assert shape.quantization == "fp8"


@pytest.mark.parametrize("field", ["architectures", "num_hidden_layers", "hidden_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, "4", [], True])
def test_config_without_what_a_plan_needs(field: str, value: object) -> None:
    with pytest.raises(InputError, match=r"config\.json .* \(the file\)"):
        parse_config(json.dumps(CONFIG | {field: value}).encode(), where="the file", weight_bytes=1)


# --- manifest


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../b", "", "a//b", ".hidden", "-rf", "a\nb", "#x"])
def test_manifest_refuses_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(ValueError, match="plain path"):
        ManifestFile(path=path, size=1, sha256="0" * 64)


def test_manifest_needs_one_hash_and_order() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        ManifestFile(path="a", size=1)
    with pytest.raises(ValueError, match="exactly one"):
        ManifestFile(path="a", size=1, sha256="0" * 64, git_sha1="0" * 40)
    files = tuple(ManifestFile(path=path, size=1, sha256="0" * 64) for path in ("b", "a"))
    with pytest.raises(ValueError, match="sorted"):
        Manifest(files=files)


def test_canonical_json_is_what_the_digest_says() -> None:
    manifest = Manifest(files=(ManifestFile(path="a", size=1, sha256="0" * 64),))
    assert manifest.canonical_json() == b'{"files":[{"path":"a","sha256":"%s","size":1}]}' % (b"0" * 64)
    assert manifest.digest == hashlib.sha256(manifest.canonical_json()).hexdigest()


def test_git_blob_hash_is_gits(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"what is up, doc?")
    assert git_blob_sha1(file) == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"


# --- a hub


def test_hub_gives_commit_shape_and_manifest(hub: HubStandin, model: Path) -> None:
    source = from_hub(hub, "org/tiny", "v1")
    assert (source.kind, source.location, source.name) == ("hub", "org/tiny", "tiny")
    assert source.commit == hub.repositories["org/tiny"].commit
    assert source.shape.model_dump() == resolve_source(str(model), None, Path()).shape.model_dump()
    files = {file.path: file for file in source.manifest.files}
    assert files["config.json"].git_sha1 == git_blob_sha1(model / "config.json")
    weights = "model-00001-of-00002.safetensors"
    assert files[weights].sha256 == hashlib.sha256((model / weights).read_bytes()).hexdigest()
    assert "README.md" not in files
    assert hub.sent_of(weights) == 0


def test_pinned_commit_needs_the_hub_once(hub: HubStandin) -> None:
    commit = hub.repositories["org/tiny"].commit
    first = from_hub(hub, "org/tiny", commit)
    asked = len(hub.requests)
    assert from_hub(hub, "org/tiny", commit) == first
    assert len(hub.requests) == asked


def test_moved_branch_is_seen(hub: HubStandin, model: Path) -> None:
    first = from_hub(hub, "org/tiny")
    (model / "tokenizer.json").write_text('{"new":1}')
    second = from_hub(hub, "org/tiny")
    assert second.commit != first.commit
    assert second.manifest.digest != first.manifest.digest


@pytest.mark.parametrize(
    ("repo", "revision", "token", "sentence"),
    [
        ("org/absent", None, None, r"no such repository, or it is private and no token was given"),
        ("org/absent", None, "hf_right", r"no such repository, or it is private \("),
        ("org/secret", None, None, r"no such repository, or it is private and no token"),
        ("org/gated", None, None, r"gated and no token was given .*accept its terms at http"),
        ("org/tiny", "v9", None, r"no revision v9"),
        ("org/tiny", None, "hf_wrong", r"refused the token \(HTTP 401\)"),
    ],
)
def test_hub_errors_are_one_sentence(
    hub: HubStandin, repo: str, revision: str | None, token: str | None, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        from_hub(hub, repo, revision, token)
    assert "\n" not in str(caught.value)
    assert token is None or token not in str(caught.value)


@pytest.mark.parametrize("repo", ["org/secret", "org/gated"])
def test_token_opens_and_stays_with_the_hub(
    hub: HubStandin, repo: str, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    source = from_hub(hub, repo)
    assert source.shape.num_hidden_layers == 4
    assert "hf_right" not in source.model_dump_json()
    assert all(b"hf_right" not in path.read_bytes() for path in caches.rglob("*") if path.is_file())


def test_hub_out_of_reach() -> None:
    with HubStandin({}) as gone:
        endpoint = gone.endpoint
    with pytest.raises(InputError, match=r"did not answer \(ConnectError\).*ppdeploy_hf_endpoint"):
        resolve_source("org/tiny", None, Path(), endpoint)


def test_offline_controller() -> None:
    program = (
        "from pathlib import Path\nfrom ppdeploy.sources import resolve_source\n"
        "from ppdeploy.errors import InputError\n"
        "try: resolve_source('org/tiny', None, Path())\nexcept InputError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "HF_HUB_OFFLINE is set" in done.stdout


def test_index_of_the_hub_with_absent_files(hub: HubStandin, model: Path) -> None:
    DAMAGE["absent file"](model)
    with pytest.raises(InputError, match="absent files: model-00002"):
        from_hub(hub, "org/tiny")


def test_repository_without_config(hub: HubStandin, model: Path) -> None:
    DAMAGE["no config"](model)
    with pytest.raises(InputError, match=r"no config\.json"):
        from_hub(hub, "org/tiny")
