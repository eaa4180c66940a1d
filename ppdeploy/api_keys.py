"""The API keys of a cluster: kept beside its inventory as SHA-256, so that who reads the file has no key."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from ppdeploy.errors import InputError
from ppdeploy.paths import kept_dir

FIRST = "first"
"""Name of the key that the first apply makes."""

NEVER = 4_102_444_800
"""2100-01-01 in seconds since 1970: what a gateway is told of a key that does not expire."""

_PREFIX = "sk-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_AGE = re.compile(r"([1-9][0-9]{0,4})([hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


class ApiKey(BaseModel):
    """A key that was given out; times are in UTC."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # As a gateway's map can hold them.
    name: str = Field(pattern=f"^{_NAME.pattern}$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def state(self, now: datetime) -> Literal["valid", "expired", "revoked"]:
        """Return whether a gateway lets it in at `now`."""
        if self.revoked:
            return "revoked"
        return "expired" if self.expires and self.expires <= now else "valid"


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys_schema: Literal[1] = 1
    keys: tuple[ApiKey, ...] = ()


def gateway_dir(inventory_dir: Path) -> Path:
    """Return the folder of what belongs to a cluster's gateways: keys, CA and certificates."""
    return kept_dir(inventory_dir) / "gateway"


def keys_file(inventory_dir: Path) -> Path:
    """Return the file of the keys."""
    return gateway_dir(inventory_dir) / "keys.json"


def read_keys(inventory_dir: Path) -> tuple[ApiKey, ...]:
    """Return all keys that were ever given out, oldest first. Raises InputError for a file that cannot be read."""
    path = keys_file(inventory_dir)
    try:
        return _Kept.model_validate_json(path.read_bytes()).keys
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(
            f"the API keys cannot be read: {error.strerror}",
            where=str(path),
            remedy="let this account read the file, or run ppdeploy as the one that owns it",
        ) from None
    except ValidationError:
        raise InputError(
            "the API keys cannot be read: it is not what ppdeploy wrote",
            where=str(path),
            remedy="bring the file back from a backup, or move it away and give out new keys",
        ) from None


def add_key(inventory_dir: Path, name: str, expires: datetime | None, now: datetime) -> str:
    """Keep a new key and return it in clear, this one time. Raises InputError for a name that is taken or wrong."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is no name for a key",
            where="keys add",
            remedy="use letters, digits and . _ @ - (at most 63), such as the person or program that gets it",
        )
    with _held(inventory_dir):
        keys = read_keys(inventory_dir)
        if any(key.name == name and not key.revoked for key in keys):
            raise InputError(
                f"there is a key named {name}",
                where=str(keys_file(inventory_dir)),
                remedy=f"choose another name, or run `ppdeploy keys revoke {name}` first",
            )
        return _add(inventory_dir, keys, name, expires, now)


def first_key(inventory_dir: Path, now: datetime) -> str:
    """Return a first key in clear where none was ever given out; empty otherwise."""
    with _held(inventory_dir):
        keys = read_keys(inventory_dir)
        return "" if keys else _add(inventory_dir, keys, FIRST, None, now)


def revoke_key(inventory_dir: Path, name: str, now: datetime) -> ApiKey:
    """Mark a key as revoked and return it; one that was revoked already stays so. InputError for an unknown name."""
    with _held(inventory_dir):
        keys = read_keys(inventory_dir)
        found = [key for key in keys if key.name == name]
        if not found:
            names = ", ".join(dict.fromkeys(key.name for key in keys if not key.revoked)) or "none"
            raise InputError(
                f"there is no key named {name if _NAME.fullmatch(name) else repr(name)}",
                where=str(keys_file(inventory_dir)),
                remedy=f"the keys are: {names}",
            )
        last = found[-1]
        gone = last if last.revoked else last.model_copy(update={"revoked": _whole(now)})
        _write(inventory_dir, [gone if key is last else key for key in keys])
        return gone


def map_entries(keys: Sequence[ApiKey]) -> list[dict[str, Any]]:
    """Return what a gateway is told: SHA-256, name and expiry in seconds since 1970 of each key that is not revoked."""
    return [
        {
            "sha256": key.sha256,
            "name": key.name,
            "expires": int(key.expires.timestamp()) if key.expires else NEVER,
        }
        for key in keys
        if not key.revoked
    ]


def told_keys(keys: Sequence[ApiKey]) -> dict[str, Any]:
    """Return all that a gateway is told at once: `entries` as `map_entries`, and which state of which file they are.

    `lineage` names the file by its oldest key, and is empty where there is none. `changes` counts what was ever added
    and revoked: keys are never taken out of the file, so of two states the later one has more.
    """
    return {
        "entries": map_entries(keys),
        "lineage": keys[0].sha256[:16] if keys else "",
        "changes": len(keys) + sum(key.revoked is not None for key in keys),
    }


def expiry(text: str, now: datetime) -> datetime:
    """Return when a key expires: `text` is a date in UTC such as 2027-01-31, or an age such as 12h, 90d or 8w."""
    age = _AGE.fullmatch(text)
    if age:
        found = now + timedelta(**{_UNITS[age[2]]: int(age[1])})
    else:
        try:
            found = datetime.fromisoformat(text)
            found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
        except (ValueError, OverflowError):
            # The latter: a year that a time zone takes out of the calendar.
            raise InputError(
                f"{text!r} is neither a date nor an age",
                where="--expires",
                remedy="write a date in UTC such as 2027-01-31, or an age such as 12h, 90d or 8w",
            ) from None
    if found <= now:
        raise InputError(f"{text} is in the past", where="--expires", remedy="name a time to come")
    if found.timestamp() >= NEVER:
        raise InputError(f"{text} is too far away", where="--expires", remedy="leave it out: the key never expires")
    return _whole(found)


# ---- the file --------------------------------------------------------------------------------------------------------


def _add(inventory_dir: Path, keys: Sequence[ApiKey], name: str, expires: datetime | None, now: datetime) -> str:
    clear = _PREFIX + secrets.token_urlsafe(32)
    made = ApiKey(name=name, sha256=hashlib.sha256(clear.encode()).hexdigest(), created=_whole(now), expires=expires)
    _write(inventory_dir, [*keys, made])
    return clear


def _write(inventory_dir: Path, keys: Sequence[ApiKey]) -> None:
    write_secret(keys_file(inventory_dir), (_Kept(keys=tuple(keys)).model_dump_json(indent=1) + "\n").encode())


def write_secret(path: Path, data: bytes) -> None:
    """Replace a file as a whole, for its owner's eyes alone. InputError where not; then the old one is untouched."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        # A file object: os.write alone writes a part where a disk is full, and says so by its return value only.
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise InputError(
            f"the file cannot be written: {error.strerror}",
            where=str(path),
            remedy="make room on its disk, and the folder writable for you",
        ) from None


@contextmanager
def _held(inventory_dir: Path) -> Iterator[None]:
    with held_folder(gateway_dir(inventory_dir)):
        yield


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Make a folder for its owner's eyes alone, and let no other process change it meanwhile. InputError where not."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(
            f"the folder for API keys and certificates cannot be made: {error.strerror}",
            where=str(folder),
            remedy="make the inventory's folder writable for you",
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _whole(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(microsecond=0)


def key_row(key: ApiKey, now: datetime) -> Mapping[str, str | None]:
    """Return what `keys list` tells of a key."""
    return {
        "name": key.name,
        "state": key.state(now),
        "created": _told(key.created),
        "expires": _told(key.expires),
        "revoked": _told(key.revoked),
    }


def _told(moment: datetime | None) -> str | None:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}" if moment else None
