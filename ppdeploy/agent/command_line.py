"""Reading the command line and environment that a release gives its rank (systemd's own quoting)."""

from __future__ import annotations


class QuotingError(ValueError):
    """A line that systemd would not take either."""


def split(line: str, instance: str) -> list[str]:
    """Split the value of `ExecStart=` as systemd does (systemd.service(5)); `%i` is `instance`, `$$` is a dollar."""
    words: list[str] = []
    word: list[str] = []
    quote, begun, index = "", False, 0
    while index < len(line):
        character = line[index]
        if character == "\\" and index + 1 < len(line):
            index += 1
            word.append(line[index])
            begun = True
        elif quote:
            if character == quote:
                quote = ""
            else:
                word.append(character)
        elif character in "\"'" and not word:
            quote, begun = character, True
        elif character in " \t":
            if begun or word:
                words.append("".join(word))
            word, begun = [], False
        else:
            word.append(character)
        index += 1
    if quote:
        raise QuotingError(f"a quote is not closed in {line!r}")
    if begun or word:
        words.append("".join(word))
    return [_expand(item, instance) for item in words]


def exec_start(unit_text: str, instance: str) -> list[str]:
    """Return the words of the one `ExecStart=` of a unit file or drop-in; raise `QuotingError`."""
    lines = [line.partition("=")[2] for line in unit_text.splitlines() if line.startswith("ExecStart=")]
    lines = [line.strip() for line in lines if line.strip()]
    if len(lines) != 1:
        raise QuotingError(f"{len(lines)} ExecStart= lines where one is needed")
    return split(lines[0], instance)


def environment(text: str) -> dict[str, str]:
    """Return the variables of an environment file (systemd.exec(5)): names, and values without their quotes."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        name, separator, value = stripped.partition("=")
        if not separator:
            raise QuotingError(f"no variable in {stripped!r}")
        found[name.strip()] = _unquote(value.strip())
    return found


def option(words: list[str], name: str) -> str:
    """Return the value of an option in an argv, as `--name value` or `--name=value`; empty when it is not there."""
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


def with_option(words: list[str], name: str, value: str) -> list[str]:
    """Return the argv with an option that it has set to another value; without it, the argv as it is."""
    changed = list(words)
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            changed[index + 1] = value
        elif word.startswith(f"{name}="):
            changed[index] = f"{name}={value}"
    return changed


def _expand(word: str, instance: str) -> str:
    return word.replace("%%", "\0").replace("%i", instance).replace("\0", "%").replace("$$", "$")


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        inner, quote = value[1:-1], value[0]
        if quote == "'":
            return inner
        plain: list[str] = []
        escaped = False
        for character in inner:
            if escaped or character != "\\":
                plain.append(character)
                escaped = False
            else:
                escaped = True
        return "".join(plain)
    return value
