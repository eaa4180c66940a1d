"""Make a bundle: fetch what is missing, check it, and put the folder in its place at once."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ppdeploy.bundle.alone import alone
from ppdeploy.bundle.content import (
    DRIVER,
    LOCKS,
    MANIFEST,
    MODELS,
    PACKAGES,
    WHEELS,
    Bundle,
    BundleFile,
    BundleLock,
    BundleModel,
    BundlePackages,
    open_bundle,
    sha256,
)
from ppdeploy.bundle.driver import DriverWish, fetch_driver, require_driver
from ppdeploy.bundle.model import fetch_model, model_path
from ppdeploy.bundle.packages import fetch_packages, require_fetchable
from ppdeploy.bundle.pip import fetch
from ppdeploy.errors import BlockedError, InputError
from ppdeploy.locks import Lock, Wheel, uv_wheel
from ppdeploy.paths import cache_dir
from ppdeploy.spec import BundledDriver

_BATCH_BYTES = 64 * 1024**2
"""pip keeps nothing of a run that is cut off, so it is run for about this much at a time."""


@dataclass(frozen=True)
class Progress:
    """How far a bundle is."""

    done: int
    """Bytes."""
    total: int
    """Bytes."""
    doing: str
    """What happens now, such as the names of the packages that are fetched."""


@dataclass(frozen=True)
class ModelWish:
    """A model that is to be in a bundle."""

    repository: str
    revision: str | None = None
    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)


def default_folder(locks: Sequence[Lock]) -> Path:
    """Return where the bundle of these locks lies when no folder is named."""
    digests = sorted(lock.digest for lock in locks)
    key = digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return cache_dir() / "wheelhouse" / key[:16]


def make_bundle(
    locks: Lock | Sequence[Lock],
    out: Path | None = None,
    *,
    index_url: str | None = None,
    extra_index_url: str | None = None,
    packages: Sequence[str] = (),
    driver: DriverWish | None = None,
    model: ModelWish | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Bundle:
    """Make the bundle of one or more locks in `out`, or return it when it is there already.

    The files come by pip as it is set up on this machine, `index_url` standing in for its index and
    `extra_index_url` added to it. Work goes on in `OUT.partial`, whose wheels and models are kept when it is
    interrupted, and which is renamed to `out` when every hash was checked; a second run at the same time waits.
    `packages` are system packages, fetched by this machine's package manager for nodes of the same release, and so is
    `driver`: both anew each time, since archives go on. `model` is one of a hub. The bundle's path is absolute. Raises
    InputError, BlockedError when the disk is too small, or PpdeployError from pip.
    """
    wanted = [locks] if isinstance(locks, Lock) else list(locks)
    # apt and dnf take a relative folder for one of their own, and nodes know no folder of ours.
    folder = (out or default_folder(wanted)).absolute()
    tell = progress or (lambda _: None)
    _require_writable(folder)
    with alone(folder, lambda: tell(Progress(0, 0, "waiting for another ppdeploy that makes the same bundle"))):
        held = _existing(folder)
        if held is not None and not packages and driver is None and _is_enough(held, wanted, model):
            return held
        # Before anything is fetched.
        if packages:
            require_fetchable(wanted[0].machine)
        if driver is not None:
            require_driver(driver)
        partial = folder.with_name(f"{folder.name}.partial")
        _clear(partial)
        (partial / WHEELS).mkdir(parents=True, exist_ok=True)
        kept = _take_over(held, partial, _anew(packages, driver, model)) if held is not None else ()
        # Before some gigabytes of wheels: here it shows what this machine's archives lack.
        system = held.packages if held is not None else None
        if packages:
            system = fetch_packages(packages, wanted[0].machine, partial, lambda doing: tell(Progress(0, 0, doing)))
        brought = held.driver if held is not None else None
        if driver is not None:
            brought = fetch_driver(driver, partial, lambda doing: tell(Progress(0, 0, doing)))
        _fill(partial, wanted, index_url, extra_index_url, tell)
        models = {one.path: one for one in (held.models if held is not None else ())}
        if model is not None:
            made = fetch_model(
                model.repository,
                model.revision,
                partial,
                endpoint=model.endpoint,
                token=model.token,
                tell=lambda done, total, doing: tell(Progress(done, total, doing)),
            )
            models[made.path] = made
        bundle = _write_manifest(partial, wanted, system, brought, list(models.values()), kept)
        _remove_unlisted(partial, bundle)
        _put_in_place(partial, folder)
    return bundle.at(folder)


def _require_writable(folder: Path) -> None:
    """Refuse a folder beside which no file can be made: the lock and what is half done lie there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.with_name(f"{folder.name}.lock").touch()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"nothing can be written beside the bundle's folder: {reason}",
            where=str(folder),
            remedy="name with --out a folder below one that you may write to",
        ) from None


def _fill(
    partial: Path,
    locks: Sequence[Lock],
    index_url: str | None,
    extra_index_url: str | None,
    tell: Callable[[Progress], None],
) -> None:
    """Complete the wheels of a bundle."""
    wheels = partial / WHEELS
    needed: dict[str, tuple[Wheel, Lock]] = {}
    for lock in locks:
        for wheel in (*lock.wheels, uv_wheel(lock.machine)):
            needed.setdefault(wheel.file, (wheel, lock))
    total = sum(wheel.size for wheel, _ in needed.values())
    tell(Progress(0, total, "checking what is there"))
    missing = {name: pair for name, pair in needed.items() if not _good(wheels / name, pair[0])}
    for name, (wheel, _) in list(missing.items()):
        if wheel.content is not None:
            (wheels / name).write_bytes(wheel.content)
            del missing[name]
    _check_disk(partial, [wheel for wheel, _ in missing.values()])
    done = total - sum(wheel.size for wheel, _ in missing.values())
    for batch, lock in _batches(list(missing.values())):
        doing = ", ".join(wheel.project for wheel in batch[:3]) + (" ..." if len(batch) > 3 else "")
        tell(Progress(done, total, doing))
        fetch(
            batch,
            lock,
            wheels,
            index_url=index_url,
            extra_index_url=extra_index_url,
            watch=_watch(done, total, doing, tell),
        )
        _check_batch(batch, wheels)
        done += sum(wheel.size for wheel in batch)
    tell(Progress(total, total, "the wheels are there"))
    for stray in wheels.iterdir():
        if stray.name not in needed:
            stray.unlink()


def _is_enough(held: Bundle, locks: Sequence[Lock], model: ModelWish | None) -> bool:
    """Tell whether a bundle has the wheels and the model; what a branch of a hub names is asked anew."""
    same = [one for one in held.models if model and one.repository == model.repository]
    has_model = model is None or any(one.commit == model.revision for one in same)
    return all(held.holds(lock) for lock in locks) and has_model


def _watch(done: int, total: int, doing: str, tell: Callable[[Progress], None]) -> Callable[[int], None]:
    most = 0

    def watch(held: int) -> None:
        # pip removes its own copy when it has put a file in its place.
        nonlocal most
        most = max(most, held)
        tell(Progress(min(done + most, total), total, doing))

    return watch


def _write_manifest(
    partial: Path,
    locks: Sequence[Lock],
    packages: BundlePackages | None,
    driver: BundledDriver | None,
    models: Sequence[BundleModel],
    kept: Sequence[BundleFile],
) -> Bundle:
    """Write what is there. A file that was kept has the hash that it was fetched with: it may be damaged since."""
    (partial / LOCKS).mkdir(exist_ok=True)
    wheels = {wheel.file: wheel for lock in locks for wheel in (*lock.wheels, uv_wheel(lock.machine))}
    files = [BundleFile(path=f"{WHEELS}/{w.file}", sha256=w.sha256, size=w.size) for w in wheels.values()]
    others = sorted(path for path in (partial / PACKAGES).rglob("*") if path.is_file()) if packages else []
    others += sorted(path for path in (partial / DRIVER).rglob("*") if path.is_file()) if driver else []
    others += [partial / one.path / name for one in models for name in one.files]
    known = {file.path: file for file in kept}
    for path in others:
        name = path.relative_to(partial).as_posix()
        files.append(known.get(name) or BundleFile(path=name, sha256=sha256(path), size=path.stat().st_size))
    for lock in locks:
        (partial / LOCKS / lock.path.name).write_text(lock.text, encoding="utf-8")
        size = len(lock.text.encode())
        files.append(BundleFile(path=f"{LOCKS}/{lock.path.name}", sha256=lock.digest, size=size))
    bundle = Bundle(
        locks=tuple(
            BundleLock(
                file=f"{LOCKS}/{lock.path.name}",
                digest=lock.digest,
                device=lock.device,
                vllm_version=lock.vllm_version,
                python=lock.python,
                machine=lock.machine,
                wheels=tuple(wheel.file for wheel in lock.wheels),
                uv=uv_wheel(lock.machine).file,
            )
            for lock in locks
        ),
        packages=packages,
        driver=driver,
        models=tuple(models),
        files=tuple(sorted(files, key=lambda file: file.path)),
    )
    (partial / MANIFEST).write_text(bundle.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return bundle


def _batches(missing: Sequence[tuple[Wheel, Lock]]) -> Iterator[tuple[list[Wheel], Lock]]:
    """Group files of one Python and machine, smallest first, so that an early end keeps much."""
    targets = {(lock.python, lock.machine): lock for _, lock in missing}
    for target, lock in targets.items():
        batch: list[Wheel] = []
        for wheel, its_lock in sorted(missing, key=lambda pair: pair[0].size):
            if (its_lock.python, its_lock.machine) != target:
                continue
            # One distribution of two versions, which two locks may want, cannot be one request.
            if batch and (
                sum(w.size for w in batch) + wheel.size > _BATCH_BYTES or any(w.project == wheel.project for w in batch)
            ):
                yield batch, lock
                batch = []
            batch.append(wheel)
        if batch:
            yield batch, lock


def _good(path: Path, wheel: Wheel) -> bool:
    """Tell whether a file is the wheel; one that is not is removed."""
    if not path.is_file():
        return False
    if path.stat().st_size == wheel.size and sha256(path) == wheel.sha256:
        return True
    path.unlink()
    return False


def _check_batch(batch: Sequence[Wheel], wheels: Path) -> None:
    for wheel in batch:
        if not _good(wheels / wheel.file, wheel):
            raise InputError(
                f"pip brought another file of {wheel.project} than {wheel.file}",
                remedy="check pip's index and find-links for builds of your own",
            )


def _check_disk(folder: Path, missing: Sequence[Wheel]) -> None:
    """Refuse to start what cannot end: room for all files, and for a copy of the largest, made by pip."""
    needed = sum(wheel.size for wheel in missing) + max((wheel.size for wheel in missing), default=0)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BlockedError(
            f"the bundle needs {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free",
            where=str(folder),
            remedy="free some space or name another folder with --out",
        )


def _existing(folder: Path) -> Bundle | None:
    """Return the bundle that lies in a folder, None where nothing is; any other content is refused."""
    if not folder.exists():
        return None
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        return None
    return open_bundle(folder)


def _clear(partial: Path) -> None:
    """Remove what an interrupted run left and nothing can be told of: all but wheels and models, which have hashes."""
    for left in partial.iterdir() if partial.is_dir() else ():
        if left.name not in (WHEELS, MODELS):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _anew(packages: Sequence[str], driver: DriverWish | None, model: ModelWish | None) -> tuple[str, ...]:
    """Return the beginnings of the paths of what is fetched whatever an older bundle has of it."""
    asked = {PACKAGES: bool(packages), DRIVER: driver is not None}
    return (
        *(f"{name}/" for name, wanted in asked.items() if wanted),
        *([f"{model_path(model.repository)}/"] if model else []),
    )


def _take_over(held: Bundle, partial: Path, anew: tuple[str, ...]) -> list[BundleFile]:
    """Link what an older bundle has into the new one; return what of it stays as it is.

    Wheels, and a model that is asked for, are checked by their hashes there: what an interrupted run has fetched of
    them goes before.
    """
    kept = []
    for file in held.files:
        target = partial / file.path
        stays = not file.path.startswith((f"{LOCKS}/", f"{WHEELS}/", *anew))
        checked = file.path.startswith((f"{WHEELS}/", f"{MODELS}/"))
        if not stays and (not checked or target.exists()):
            continue
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(held.path / file.path, target)
        if stays:
            kept.append(file)
    return kept


def _remove_unlisted(partial: Path, bundle: Bundle) -> None:
    """Remove what a bundle does not list, such as a model that an interrupted run began with."""
    listed = {partial / name for name in (MANIFEST, *(file.path for file in bundle.files))}
    # What lies in a folder comes before it.
    for path in sorted(partial.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in listed:
            path.unlink()


def _put_in_place(partial: Path, folder: Path) -> None:
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
