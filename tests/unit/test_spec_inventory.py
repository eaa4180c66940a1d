"""Inventories as people write them, read by the real ansible-inventory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.errors import InputError
from ppdeploy.spec import inventory, load_inventory

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct horse"

TWO_PIPELINES = """\
---
all:
  vars:
    ppdeploy_start_timeout: 600
  children:
    monitoring:
      hosts:
        door: {ppdeploy_start_timeout: 900}
    vllm:
      children:
        zeta:
          hosts:
            n9: {ansible_host: 198.18.0.19}
            n1: {ansible_host: 198.18.0.11, ppdeploy_fabric_interface: fab0}
            n5: {ansible_connection: local}
          vars:
            ppdeploy_model: Qwen/Qwen3-32B
            ppdeploy_vllm_args: {max-num-seqs: 8}
        alpha:
          children:
            rack2: {hosts: {m2: , m1: }}
            rack1: {hosts: {m3: , m2: }}
          vars:
            ppdeploy_model: gpt2
"""

ONE = """\
---
vllm:
  children:
    chat:
      hosts:
        a: {ansible_host: 198.18.0.11}
        b: {ansible_host: 198.18.0.12}
      vars:
        ppdeploy_model: Qwen/Qwen3-32B
"""


class Write(Protocol):
    """Writes a file of an inventory, by default hosts.yml, and returns the inventory's folder."""

    def __call__(self, text: str, name: str = "hosts.yml") -> Path: ...


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes into one inventory folder."""
    folder = tmp_path / "mine"
    folder.mkdir()

    def run(text: str, name: str = "hosts.yml") -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return folder

    return run


def refusal(path: Path, **more: Any) -> str:
    with pytest.raises(InputError) as error:
        load_inventory(path, **more).spec()
    assert error.value.exit_code == 2
    return str(error.value)


def ansible(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_groups_below_vllm_are_pipelines_in_the_order_of_ansible(write: Write) -> None:
    loaded = load_inventory(write(TWO_PIPELINES))
    assert loaded.pipelines == {"zeta": ("n9", "n1", "n5"), "alpha": ("m2", "m1", "m3")}
    spec = loaded.spec()
    assert spec.cluster == "mine"
    zeta, alpha = spec.pipelines
    assert [(h.name, h.address, h.vars.fabric_interface) for h in zeta.hosts] == [
        ("n9", "198.18.0.19", None),
        ("n1", "198.18.0.11", "fab0"),
        ("n5", "n5", None),
    ]
    assert (zeta.vars.model, zeta.vars.vllm_args, zeta.vars.start_timeout) == (
        "Qwen/Qwen3-32B",
        {"max-num-seqs": 8},
        600,
    )
    assert alpha.vars.model == "gpt2"
    # The play sees hosts in this order too.
    play = ansible("ansible-inventory", "-i", write(TWO_PIPELINES), "--graph", "alpha")
    assert [line.rsplit("-", 1)[1] for line in play.splitlines() if "--" in line and "@" not in line] == [
        *("m2", "m1", "m3", "m2"),
    ]


def test_the_group_gateway_may_have_workers_and_hosts_in_no_pipeline(write: Write) -> None:
    group = "    gateway:\n      hosts:\n        m1:\n        door: {ansible_host: '198.18.0.{{ 40 + 2 }}'}\n"
    loaded = load_inventory(write(TWO_PIPELINES.replace("    vllm:\n", f"{group}    vllm:\n")))
    spec = loaded.spec()
    assert sorted((host.name, host.address) for host in spec.gateways) == [("door", "198.18.0.42"), ("m1", "m1")]
    assert [host.name for host in spec.outside] == ["door"]
    told = loaded.gateway_values()
    assert told["door"] == {"ppdeploy_start_timeout": 900, "ansible_host": "198.18.0.42"}
    # What belongs to a pipeline that is left out is no gateway, and no host outside either.
    assert [host.name for host in spec.only(["zeta"]).gateways] == ["door"]


def test_a_gateway_with_an_address_of_the_example_is_refused(write: Write) -> None:
    group = "gateway:\n  hosts:\n    door: {ansible_host: 192.0.2.20}\n"
    assert "192.0.2.20 belongs to the example, not to a machine (host door" in refusal(write(ONE + group))


def test_a_file_and_an_ini_inventory_with_group_vars_are_read(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "vllm.yml").write_text("---\nppdeploy_model: ./m\nppdeploy_device: cpu\n")
    file = tmp_path / "hosts"
    file.write_text(
        "[vllm:children]\nchat\n[chat]\nn[2:1:-1] \nn3 ansible_port=2222\n[chat:vars]\nppdeploy_api_port=8001\n"
    )
    file.write_text(file.read_text().replace("n[2:1:-1] ", "n[1:2]"))
    loaded = load_inventory(file)
    pipeline = loaded.spec().pipelines[0]
    assert loaded.pipelines == {"chat": ("n1", "n2", "n3")}
    assert loaded.ssh_ports == {"n3": 2222}
    assert (pipeline.vars.api_port, pipeline.vars.device, pipeline.model_path) == (8001, "cpu", tmp_path / "m")


def test_a_relative_path_is_read_from_the_current_folder(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(ONE).parent)
    loaded = load_inventory(Path("mine"))
    assert loaded.directory == Path.cwd() / "mine"
    assert loaded.spec().inventory_dir == Path.cwd() / "mine"


def test_extra_variables_win_as_in_a_play(write: Write) -> None:
    loaded = load_inventory(write(ONE), extra_vars=["ppdeploy_api_port=9000", '{"ppdeploy_env": {"A": 1}}'])
    assert loaded.spec().pipelines[0].vars.api_port == 9000
    assert loaded.spec().pipelines[0].vars.env == {"A": "1"}


def test_templates_are_rendered_as_a_play_would(write: Write) -> None:
    text = ONE + (
        '        base: "{{ inventory_dir }}/../models"\n'
        '        ppdeploy_api_port: "{{ 8000 + 7 }}"\n'
        "        ppdeploy_vllm_args: {max-num-seqs: '{{ [2, 4] | sum }}'}\n"
    )
    text = text.replace("Qwen/Qwen3-32B", '"{{ base }}/tiny"').replace("198.18.0.12", '"198.18.0.{{ 10 + 3 }}"')
    folder = write(text)
    loaded = load_inventory(folder)
    pipeline = loaded.spec().pipelines[0]
    assert pipeline.pending == ()
    assert pipeline.vars.api_port == 8007
    assert pipeline.vars.vllm_args == {"max-num-seqs": 6}
    assert pipeline.vars.model == f"{folder}/../models/tiny"
    assert [host.address for host in pipeline.hosts] == ["198.18.0.11", "198.18.0.13"]


def test_what_only_a_play_can_render_is_pending_and_spoils_no_other(write: Write) -> None:
    text = ONE + (
        '        ppdeploy_api_port: "{{ 8000 + 7 }}"\n'
        "        ppdeploy_env: {A: '{{ not_here }}'}\n"
        "        ppdeploy_hf_token: \"{{ lookup('env', 'NOWHERE') }}\"\n"
    )
    loaded = load_inventory(write(text))
    assert loaded.pending["a"] == {"ppdeploy_env", "ppdeploy_hf_token"}
    pipeline = loaded.spec().pipelines[0]
    assert pipeline.pending == ("ppdeploy_env", "ppdeploy_hf_token")
    assert pipeline.has_hf_token
    assert pipeline.vars.api_port == 8007


def test_what_is_marked_unsafe_is_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = {
        "vllm": {"children": ["chat"]},
        "chat": {"hosts": ["a"]},
        "_meta": {
            "hostvars": {
                "a": {
                    "ppdeploy_model": "gpt2",
                    "ppdeploy_vllm_args": {"chat-template": {"__ansible_unsafe": "{{ messages }}"}},
                }
            }
        },
    }
    monkeypatch.setattr(inventory, "inventory_list", lambda *_: listing)
    pipeline = load_inventory(ROOT / "inventory/example").spec().pipelines[0]
    assert pipeline.pending == ()
    assert pipeline.vars.vllm_args == {"chat-template": "{{ messages }}"}


def test_a_vaulted_file_needs_its_password(write: Write, tmp_path: Path) -> None:
    folder = write(ONE)
    write("---\nppdeploy_hf_token: hunter2\nppdeploy_api_port: 8001\n", "group_vars/chat.yml")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(PASSWORD)
    wrong.write_text("another")
    secret = folder / "group_vars/chat.yml"
    ansible("ansible-vault", "encrypt", "--vault-password-file", right, secret)
    text = refusal(folder)
    assert text == (
        f"the inventory is encrypted, and no password was given ({secret}): "
        "give the password with --ask-vault-pass or --vault-password-file FILE"
    )
    assert "the password is wrong" in refusal(folder, vault_args=["--vault-password-file", str(wrong)])
    loaded = load_inventory(folder, vault_args=["--vault-password-file", str(right)])
    pipeline = loaded.spec().pipelines[0]
    assert pipeline.has_hf_token
    assert pipeline.vars.api_port == 8001
    assert "hunter2" not in repr(loaded) + repr(pipeline)


def test_a_single_vaulted_value_is_left_to_the_play(write: Write, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    arguments = ("encrypt_string", "--vault-password-file", password, "--name", "ppdeploy_hf_token", "hunter2")
    vaulted = ansible("ansible-vault", *arguments)
    folder = write(ONE + "".join(f"        {line}\n" for line in vaulted.splitlines()))
    for more in ((), ("--vault-password-file", str(password))):
        pipeline = load_inventory(folder, vault_args=more).spec().pipelines[0]
        assert pipeline.pending == ("ppdeploy_hf_token",)
        assert pipeline.has_hf_token


def test_a_missing_inventory_is_told_with_the_way_to_get_one(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    expected = f"the inventory does not exist ({missing}): run `ppdeploy init` to write one, or give another with -i"
    assert refusal(missing) == expected


def test_a_name_that_no_file_can_have_is_told() -> None:
    assert "the inventory" in refusal(Path("a\0b"))
    assert "the inventory cannot be read: File name too long" in refusal(Path("x" * 5000))


def test_broken_yaml_is_told_with_file_and_line(write: Write) -> None:
    folder = write("---\nvllm:\n  children: [a\n")
    text = refusal(folder)
    assert "\n" not in text
    assert text.startswith("the inventory cannot be read: While parsing a flow sequence")
    assert f"({folder}/hosts.yml:4)" in text
    write(ONE)
    write("---\nppdeploy_model: x\n  y: {\n", "group_vars/chat.yml")
    assert f"({folder}/group_vars/chat.yml:3)" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hosts.ini", "[vllm:children]\nnope\n", "Section [vllm:children] includes undefined group 'nope'"),
        ("hosts.ini", "[vllm]\na b\n", "Expected key=value host variable assignment, got: b"),
        ("hosts.yml", "just words\n", "YAML inventory has invalid structure"),
        ("hosts.yml", "---\n", "Parsed empty YAML file"),
    ],
)
def test_what_ansible_refuses_is_told_in_its_words(write: Write, name: str, text: str, reason: str) -> None:
    folder = write(text, name)
    told = refusal(folder / name)
    assert "\n" not in told
    assert told.startswith("the inventory cannot be read: ")
    assert reason in told
    assert told.endswith(f"`ansible-inventory -i {folder / name} --list` says more")


def test_what_is_written_twice_is_told_with_its_line(write: Write) -> None:
    folder = write(ONE)
    text = (folder / "hosts.yml").read_text()
    write("---\nppdeploy_goal: latency\nppdeploy_goal: context\n", "group_vars/chat.yml")
    assert refusal(folder) == (
        f"ppdeploy_goal is written twice in one map, of which YAML would keep the second alone "
        f"({folder}/group_vars/chat.yml:3): remove one of the two, or give it the name that was meant"
    )
    (folder / "group_vars" / "chat.yml").unlink()
    write("---\nall:\n  hosts:\n    a: {ansible_host: 10.0.0.1}\n    a: {ansible_host: 10.0.0.2}\n")
    assert "a is written twice in one map" in refusal(folder)
    write(text)
    assert load_inventory(folder).pipelines


def test_hosts_that_are_a_list_are_told_with_how_to_write_them(write: Write) -> None:
    folder = write("all:\n  children:\n    vllm:\n      children:\n        chat:\n          hosts: [a, b]\n")
    told = refusal(folder)
    assert told.startswith("hosts of the group chat is no map")
    assert "`NAME: {ansible_host: ADDRESS}`" in told
    assert "Tagged" not in told


def test_variables_that_are_no_map_are_told_with_their_file(write: Write) -> None:
    folder = write(ONE)
    write("just words\n", "group_vars/chat.yml")
    assert f"{folder}/group_vars/chat.yml" in refusal(folder)


def test_a_file_of_another_kind_in_the_folder_is_told(write: Write) -> None:
    folder = write(ONE)
    (folder / "model.bin").write_bytes(b"\x7fELF\xff\0\0")
    assert refusal(folder) == (
        f"the inventory has a file that is no text ({folder}/model.bin:1): "
        "move it out of the inventory's folder, which Ansible reads as a whole"
    )


@pytest.mark.parametrize("name", ["hosts.yml", "group_vars/chat.yml", "host_vars/a/more.yml"])
def test_bytes_that_are_not_utf8_are_told_with_file_and_line(write: Write, name: str) -> None:
    folder = write(ONE)
    write("", name)
    (folder / name).write_bytes(b"---\n# ok\nppdeploy_model: caf\xe9\n")
    assert refusal(folder) == (
        f"the inventory has bytes that are not UTF-8 ({folder}/{name}:3): save the file as UTF-8"
    )


@pytest.mark.parametrize("text", ["---\nall: {hosts: {a: }}\n", "---\nvllms: {children: {chat: {hosts: {a: }}}}\n"])
def test_an_inventory_without_our_group_is_told(write: Write, text: str) -> None:
    folder = write(text)
    assert refusal(folder).startswith(f"the inventory has no group `vllm` ({folder}): make it, with a group below it")


def test_an_empty_group_an_empty_pipeline_and_loose_hosts_are_told(write: Write) -> None:
    assert refusal(write("---\nvllm:\n")).startswith("the group `vllm` is empty")
    text = refusal(write("---\nvllm: {children: {chat: {hosts: {a: }}, code: {}}}\n"))
    assert 'the pipeline has no hosts (group "code")' in text
    text = refusal(write("---\nvllm: {hosts: {a: , b: }}\n"))
    assert text.startswith("a, b are directly in the group `vllm`")


def test_mistakes_are_told_together_with_their_lines(write: Write) -> None:
    folder = write(ONE + "        ppdeploy_max_modellen: 4096\n        ppdeploy_xyzzy: 1\n")
    assert refusal(folder).split("\n") == [
        (
            f"the variable ppdeploy_max_modellen is not known (hosts a, b, {folder}/hosts.yml:10): "
            "write ppdeploy_max_model_len"
        ),
        (
            f"the variable ppdeploy_xyzzy is not known (hosts a, b, {folder}/hosts.yml:11): "
            "remove it; docs/variables.md lists the known ones"
        ),
    ]
    folder = write(ONE + "        ppdeploy_api_port: 80\n        # ppdeploy_env: 1\n        ppdeploy_env: 5\n")
    assert refusal(folder).split("\n") == [
        f"ppdeploy_api_port is 80 (pipeline chat, {folder}/hosts.yml:10): set it to a port from 1024 to 65535",
        (
            f"ppdeploy_env is 5, but it is not a map (pipeline chat, {folder}/hosts.yml:12): "
            "set it to a map of environment variable names and values"
        ),
    ]


def test_a_misspelt_name_of_ansible_is_told_unless_the_right_one_is_there(write: Write) -> None:
    folder = write(
        "all:\n  children:\n    vllm:\n      children:\n        chat:\n          hosts:\n"
        "            a: {ansible_hosts: 10.0.0.1}\n            b: {ansible_host: 10.0.0.2, ansible_ip: 10.0.0.3}\n"
    )
    told = refusal(folder)
    assert told == f"the variable ansible_hosts is not known (host a, {folder}/hosts.yml:7): write ansible_host"


def test_a_misspelt_name_on_a_host_elsewhere_is_told_too(write: Write) -> None:
    text = refusal(write(TWO_PIPELINES.replace("door: {ppdeploy_start_timeout", "door: {ppdeploy_start_timout")))
    assert "the variable ppdeploy_start_timout is not known (host door" in text
    assert "write ppdeploy_start_timeout" in text


def test_a_value_for_one_host_that_belongs_to_the_pipeline_is_told_with_its_place(write: Write) -> None:
    folder = write(ONE.replace("b: {", "b: {ppdeploy_max_model_len: 4096, "))
    assert refusal(folder) == (
        "ppdeploy_max_model_len differs between the hosts of pipeline chat: not set on a; 4096 on b "
        f"({folder}/hosts.yml:7): set it once, in the vars of the group chat"
    )


def test_one_address_for_two_hosts_and_one_host_in_two_pipelines_are_told(write: Write) -> None:
    assert "2 hosts have one address, 198.18.0.11 (hosts a, b)" in refusal(write(ONE.replace("0.12", "0.11")))
    text = refusal(write(ONE + "    code:\n      hosts: {b: }\n"))
    assert "the host is in 2 pipelines: chat, code (host b)" in text


@pytest.mark.parametrize("address", ["192.0.2.11", "gpu-1.example.com"])
def test_addresses_of_the_example_are_told(write: Write, address: str) -> None:
    folder = write(ONE.replace("198.18.0.11", address))
    text = refusal(folder)
    assert text.startswith(f"{address} belongs to the example, not to a machine (host a, {folder}/hosts.yml:6")
    assert "ppdeploy init" in text


def test_the_example_as_it_is_is_refused() -> None:
    text = refusal(ROOT / "inventory/example")
    assert text.startswith("192.0.2.11, 192.0.2.12 belong to the example, not to a machine (hosts gpu-1, gpu-2, ")
    assert "copy inventory/example to inventory/cluster" in text


def test_the_example_will_do_where_no_host_is_reached() -> None:
    loaded = load_inventory(ROOT / "inventory/example", any_address=True)
    assert [host.address for host in loaded.spec().pipelines[0].hosts] == ["192.0.2.11", "192.0.2.12"]


def test_a_dynamic_inventory_works(write: Write) -> None:
    folder = write(
        '#!/bin/sh\nprintf \'%s\' \'{"vllm": {"children": ["chat"]}, "chat": {"hosts": ["b", "a"], '
        '"vars": {"ppdeploy_model": "gpt2"}}, "_meta": {"hostvars": {}}}\'\n',
        "cloud.sh",
    )
    (folder / "cloud.sh").chmod(0o755)
    assert load_inventory(folder).spec().pipelines[0].hosts[0].name == "b"
    write("#!/bin/sh\necho no route to cloud >&2\nexit 3\n", "cloud.sh")
    assert "the inventory cannot be read: Inventory script returned non-zero exit code 3" in refusal(folder)


def test_settings_of_the_shell_do_not_change_what_is_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSIBLE_INVENTORY_EXPORT", "True")
    monkeypatch.setenv("ANSIBLE_VERBOSITY", "4")
    monkeypatch.setenv("ANSIBLE_FORCE_COLOR", "1")
    # Ansible itself refuses to start in this one.
    monkeypatch.setenv("LC_ALL", "C")
    assert load_inventory(write(TWO_PIPELINES)).spec().pipelines[0].vars.start_timeout == 600


def test_what_ansible_says_before_it_starts_is_told(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "no_such_place.UTF-8")
    assert refusal(write(ONE)).startswith(
        "the inventory cannot be read: Ansible could not initialize the preferred locale"
    )
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("ANSIBLE_TIMEOUT", "soon")
    assert "soon" in refusal(write(ONE))


def test_ansible_that_is_not_installed_is_told(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(write(ONE)).startswith("ansible-inventory is not installed")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab{}_é\n", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["vllm", "chat", "hosts", "children", "a", "_meta", "hostvars", "ansible_host", "ppdeploy_model"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=200)
@given(listing=st.dictionaries(st.sampled_from(["vllm", "chat", "code", "_meta", "all"]), JSON, max_size=4))
def test_any_listing_is_taken_or_told(listing: dict[str, Any]) -> None:
    # Inventory plugins of others write this; a template in it would start Ansible, which is not what is tested.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory, "inventory_list", lambda *_: listing)
        patch.setattr(inventory, "rendered_values", lambda *_: {})
        text = ""
        try:
            load_inventory(ROOT / "inventory/example").spec()
        except InputError as error:
            text = str(error)
    assert all(line.isprintable() for line in text.split("\n"))
