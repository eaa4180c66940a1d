"""What holds for every file of the repository, whoever writes it."""

from __future__ import annotations

import ast
import re
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

#: What names the machine of the person who wrote the file: it works there and nowhere else.
PERSONAL = {
    "a package registry or mirror": re.compile(
        r"://[^/\s]*(?:pypi|pythonhosted|debian|ubuntu|npmjs)"
        r"|://[^/\s]+/(?:debian|ubuntu)(?:-security)?(?:[/\s\"'`]|$)"
    ),
    # Not /home/me, an example that anyone reads as their own, nor what a test writes into a lab host's /root.
    "a folder of one machine": re.compile(r"(?<![\w.~*{}\])-])/(?:work/\w|Users/\w|home/(?!me\b)\w|root/(?:\.|\w+/))"),
    "a fixed place below the temporary folder": re.compile(r"(?<![\w.~*{}\])-])/tmp/[\w.]"),
}


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that git tracks, or would after `git add`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return tuple(sorted(ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()))


def shebang(file: Path) -> str:
    """The first line of a file when it names an interpreter, else nothing."""
    with file.open("rb") as handle:
        first = handle.readline(200).decode(errors="replace")
    return first if first.startswith("#!") else ""


def shell_scripts() -> list[Path]:
    return [
        file
        for file in tracked()
        if file.suffix == ".sh" or (not file.suffix and re.search(r"\b(?:ba|da)?sh\b", shebang(file)))
    ]


@pytest.mark.parametrize("what", PERSONAL)
def test_no_file_names_a_machine_of_its_author(what: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in tracked()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if PERSONAL[what].search(line)
    ]
    assert found == [], f"{what}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a package registry or mirror", "index = https://mirror.{}.example/simple".format("pypi")),
        ("a package registry or mirror", "deb http://deb.{}.example bookworm main".format("debian")),
        ("a package registry or mirror", "URIs: http://mirror.example/{}".format("debian")),
        ("a folder of one machine", "path: /{}/main/x".format("work")),
        ("a folder of one machine", 'key = "/{}/.ssh/key"'.format("root")),
        ("a folder of one machine", "cd /{}/src/ppdeploy".format("root")),
        ("a folder of one machine", "cd /{}/somebody/src".format("home")),
        ("a fixed place below the temporary folder", "out=/{}/out".format("tmp")),
    ],
)
def test_such_a_line_would_be_found(what: str, line: str) -> None:
    assert PERSONAL[what].search(line)


def test_every_shell_script_passes_shellcheck() -> None:
    scripts = shell_scripts()
    assert {ROOT / ".ci/run", ROOT / "scripts/lint.sh", ROOT / "scripts/bootstrap.sh"} <= set(scripts)
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), *scripts], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_can_be_executed_and_stops_at_the_first_error() -> None:
    # Rendered files have the mode that the plan gives them on a host, and are for any sh.
    for script in (one for one in shell_scripts() if "golden" not in one.parts):
        assert script.stat().st_mode & stat.S_IXUSR, f"chmod +x {script.relative_to(ROOT)}"
        assert re.search(r"^set -(?:eu|u)o pipefail$", script.read_text(), re.MULTILINE), script.relative_to(ROOT)


def test_every_yaml_file_of_ours_starts_a_document() -> None:
    # Two documents in a file, or none, would be read as half of what is meant.
    for file in tracked():
        if file.suffix in {".yml", ".yaml"}:
            assert len(list(yaml.compose_all(file.read_text(), Loader=yaml.CSafeLoader))) == 1, file.relative_to(ROOT)


def node_side_modules() -> list[Path]:
    return [file for file in tracked() if file.match("plugins/modules/*.py")]


@pytest.mark.parametrize("module", node_side_modules(), ids=lambda file: file.stem)
def test_a_node_needs_nothing_but_its_own_python(module: Path) -> None:
    tree = ast.parse(module.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            known = name.startswith("ansible.module_utils.") or name.split(".")[0] in sys.stdlib_module_names
            assert known, f"{module.name} imports {name}"


@pytest.mark.parametrize("role", sorted((ROOT / "roles").iterdir()), ids=lambda folder: folder.name)
def test_a_role_describes_its_variables_and_uses_its_own_prefix(role: Path) -> None:
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    options = specs["main"].get("options") or {}
    for name, option in options.items():
        assert name.startswith(f"{role.name}_"), name
        assert option.get("description"), f"{name} has no description"
        assert option.get("type"), f"{name} has no type"
    defaults = role / "defaults/main.yml"
    if defaults.exists():
        unknown = set(yaml.safe_load(defaults.read_text()) or {}) - set(options)
        assert not unknown, f"defaults that meta/argument_specs.yml does not describe: {sorted(unknown)}"


def test_roles_know_no_variable_of_the_inventory() -> None:
    # A role is given its slice of the plan under its own prefix, so that it can be used alone. Names of our
    # modules and filters are no variables.
    filters = set(re.findall(r'"(ppdeploy_\w+)": ', (ROOT / "plugins/filter/ppdeploy.py").read_text()))
    own = filters | {module.stem for module in node_side_modules()}
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in tracked()
        if file.is_relative_to(ROOT / "roles")
        for name in re.findall(r"\bppdeploy_[a-z]\w*", file.read_text())
        if name not in own
    }
    assert found == set()


def test_tools_and_caches_are_not_tracked() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        assert not {"__pycache__", ".venv", ".ansible", "dist", "build"} & set(Path(name).parts), name
        assert not name.endswith((".pyc", ".egg-info", ".retry")), name
