"""API keys: shown once, kept as SHA-256, told to gateways until they are revoked."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ppdeploy.api_keys import (
    NEVER,
    add_key,
    expiry,
    first_key,
    gateway_dir,
    keys_file,
    map_entries,
    read_keys,
    revoke_key,
    told_keys,
)
from ppdeploy.errors import InputError

NOW = datetime(2026, 11, 30, 12, 0, 5, 999, tzinfo=UTC)


def test_a_key_is_kept_as_its_hash_for_its_owner_alone(tmp_path: Path) -> None:
    key = add_key(tmp_path, "alice", None, NOW)
    assert key.startswith("sk-")
    assert len(key) >= 46
    path = keys_file(tmp_path)
    assert path.parent == tmp_path / ".ppdeploy/gateway"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert key not in path.read_text()
    assert not [entry for entry in path.parent.iterdir() if entry != path]
    assert map_entries(read_keys(tmp_path)) == [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "name": "alice", "expires": NEVER}
    ]
    assert add_key(tmp_path, "bob", None, NOW) != key


def test_only_the_first_apply_makes_a_first_key(tmp_path: Path) -> None:
    first = first_key(tmp_path, NOW)
    assert first.startswith("sk-")
    assert first_key(tmp_path, NOW) == ""
    revoke_key(tmp_path, "first", NOW)
    assert first_key(tmp_path, NOW) == ""
    assert [key.state(NOW) for key in read_keys(tmp_path)] == ["revoked"]


def test_a_revoked_key_is_told_to_nobody_and_its_name_is_free(tmp_path: Path) -> None:
    old = add_key(tmp_path, "alice", None, NOW)
    gone = revoke_key(tmp_path, "alice", NOW)
    assert gone.revoked == NOW.replace(microsecond=0)
    assert revoke_key(tmp_path, "alice", NOW + timedelta(days=1)).revoked == gone.revoked
    assert map_entries(read_keys(tmp_path)) == []
    new = add_key(tmp_path, "alice", NOW + timedelta(hours=1), NOW)
    assert new != old
    (entry,) = map_entries(read_keys(tmp_path))
    assert entry["expires"] == int((NOW + timedelta(hours=1)).timestamp())
    assert [key.state(NOW) for key in read_keys(tmp_path)] == ["revoked", "valid"]
    assert [key.state(NOW + timedelta(hours=2)) for key in read_keys(tmp_path)] == ["revoked", "expired"]


def test_wrong_names_are_refused_in_a_sentence(tmp_path: Path) -> None:
    add_key(tmp_path, "alice", None, NOW)
    with pytest.raises(InputError, match=r"^there is a key named alice \(.*keys revoke alice"):
        add_key(tmp_path, "alice", None, NOW)
    for name in ("", "two words", "a\nb", "-x", "x" * 64, "ä"):
        with pytest.raises(InputError, match="is no name for a key"):
            add_key(tmp_path, name, None, NOW)
    with pytest.raises(InputError, match=r"^there is no key named bob \(.*: the keys are: alice"):
        revoke_key(tmp_path, "bob", NOW)
    with pytest.raises(InputError, match=r"^there is no key named 'a\\nb\\x1b\[31m' \("):
        revoke_key(tmp_path, "a\nb\x1b[31m", NOW)


def test_a_file_that_is_not_ours_is_told_and_left_alone(tmp_path: Path) -> None:
    gateway_dir(tmp_path).mkdir(parents=True)
    keys_file(tmp_path).write_text('{"keys": "all of them"}')
    for work in (lambda: read_keys(tmp_path), lambda: first_key(tmp_path, NOW)):
        with pytest.raises(InputError, match="the API keys cannot be read"):
            work()
    assert keys_file(tmp_path).read_text() == '{"keys": "all of them"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12h", NOW + timedelta(hours=12)),
        ("90d", NOW + timedelta(days=90)),
        ("2w", NOW + timedelta(weeks=2)),
        ("2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2027-01-31T10:00:00+02:00", datetime(2027, 1, 31, 8, tzinfo=UTC)),
    ],
)
def test_an_expiry_is_a_date_or_an_age(text: str, expected: datetime) -> None:
    assert expiry(text, NOW) == expected.replace(microsecond=0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("soon", "neither a date nor an age"),
        ("0d", "neither"),
        ("-1d", "neither"),
        ("2026-11-30", "in the past"),
        ("2150-01-01", "too far away"),
        ("99999w", "too far away"),
        ("", "neither a date nor an age"),
        # A time zone takes these out of the calendar.
        ("9999-12-31T23:59:59-14:00", "neither"),
        ("0001-01-01T00:00:00+14:00", "neither"),
    ],
)
def test_another_expiry_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        expiry(text, NOW)


@pytest.mark.parametrize(
    ("member", "value"),
    [("sha256", "zz"), ("name", "two words"), ("created", "2026-11-30T12:00:00"), ("expires", "2026-12-30T12:00:00")],
)
def test_what_a_gateway_could_not_be_told_is_refused_where_it_is_read(tmp_path: Path, member: str, value: str) -> None:
    add_key(tmp_path, "alice", NOW + timedelta(days=1), NOW)
    kept = json.loads(keys_file(tmp_path).read_text())
    kept["keys"][0][member] = value
    keys_file(tmp_path).write_text(json.dumps(kept))
    with pytest.raises(InputError, match="not what ppdeploy wrote"):
        read_keys(tmp_path)


def test_a_full_disk_leaves_the_keys_as_they_were_and_is_told(tmp_path: Path) -> None:
    add_key(tmp_path, "alice", None, NOW)
    before = keys_file(tmp_path).read_bytes()
    script = (
        "import resource, signal, sys; from pathlib import Path; from datetime import UTC, datetime\n"
        "from ppdeploy.api_keys import add_key; from ppdeploy.errors import InputError\n"
        # As a disk that takes a part of a write and no more.
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        "try: add_key(Path(sys.argv[1]), 'bob', None, datetime.now(UTC))\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "the file cannot be written: File too large" in done.stdout
    assert keys_file(tmp_path).read_bytes() == before
    assert [entry.name for entry in keys_file(tmp_path).parent.iterdir()] == ["keys.json"]


def test_of_two_states_of_the_keys_the_later_one_has_more_changes(tmp_path: Path) -> None:
    states = [told_keys(read_keys(tmp_path))]
    for work in (
        lambda: add_key(tmp_path, "alice", None, NOW),
        lambda: add_key(tmp_path, "bob", None, NOW),
        lambda: revoke_key(tmp_path, "alice", NOW),
        lambda: add_key(tmp_path, "alice", None, NOW),
    ):
        work()
        states.append(told_keys(read_keys(tmp_path)))
    assert [state["changes"] for state in states] == [0, 1, 2, 3, 4]
    assert states[0]["lineage"] == ""
    assert len({state["lineage"] for state in states[1:]}) == 1
