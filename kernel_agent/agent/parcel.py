"""Packing a run into one tar and unpacking it elsewhere, so that a run can move between machines.

A run folder holds no absolute path, so the tar is its files and those it delivered, in the layout of `--out`:

    <stem>-<hash8>/runs/<run-id>/...
    <stem>-<hash8>/<delivered files>
"""

from __future__ import annotations

import os
import secrets
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from kernel_agent.agent import events as ev
from kernel_agent.agent.ledger import held, read_ledger
from kernel_agent.agent.runfolder import RunFolder
from kernel_agent.errors import InputError

LARGEST = 2 << 30
"""Bytes that an archive may unpack to."""


def pack(run: Path, target: Path | None = None) -> Path:
    """Write a run, and what it delivered, into one tar file; returns its path.

    `run` is a run folder, `latest`, or a delivery folder. By default the file lies in the working folder and is named
    after the run. Raises `InputError` when there is no run or the target exists, and `LedgerBusy` while another process
    works on the run.
    """
    folder = RunFolder.open(run)
    product = folder.product.name
    target = Path(f"{product}-{folder.run_id}.tar") if target is None else target
    if target.exists():
        raise InputError("this file exists and is not overwritten", remedy="Name another one with -o.", path=target)
    with held(folder.ledger):
        delivered = [folder.product / name for name in _delivered(folder)]
        files = [path for path in (*sorted(folder.path.rglob("*")), *delivered) if path.is_file()]
        half = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with tarfile.open(half, "w") as archive:
                for path in (path for path in files if not path.is_symlink()):
                    name = PurePosixPath(product, path.relative_to(folder.product).as_posix())
                    archive.add(path, str(name), recursive=False, filter=_anonymous)
            os.replace(half, target)
        finally:
            half.unlink(missing_ok=True)
    return target


def unpack(archive: Path, out: Path) -> RunFolder:
    """Unpack a run below `out`; `latest` points to it afterwards.

    Nothing in the file is trusted: whatever is no plain file below one folder is refused before anything is written.
    Delivered files that are there already stay as they are. Raises `InputError` for such an archive, for one without a
    run, and for a run that is there already.
    """
    with _opened(archive) as tar:
        members = _plain_files(tar, archive)
        place = _run_in(members, archive)
        folder = RunFolder(out.joinpath(*place.parts))
        if folder.path.exists():
            raise InputError("this run is here already", remedy="Unpack it into another folder.", path=folder.path)
        out.mkdir(parents=True, exist_ok=True)
        fresh = out / f".unpacked-{secrets.token_hex(4)}"
        try:
            for name, member in members.items():
                path = fresh.joinpath(*name.parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as file:
                    source = tar.extractfile(member)
                    if source is not None:
                        shutil.copyfileobj(source, file)
            _put_in_place(fresh, folder, place, out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _put_in_place(fresh: Path, folder: RunFolder, place: PurePosixPath, out: Path) -> None:
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    for part in ("asks", "replies", "snapshots"):  # empty folders are in no tar
        fresh.joinpath(*place.parts, part).mkdir(exist_ok=True)
    os.rename(fresh.joinpath(*place.parts), folder.path)
    for path in sorted(fresh.rglob("*")):
        target = out / path.relative_to(fresh)
        if path.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, target)
    folder.point_latest()


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        tar = tarfile.open(archive, "r:*")  # noqa: SIM115 - what fails in the block below is no fault of the file
    except FileNotFoundError:
        raise InputError("there is no such file", remedy="Check the path.", path=archive) from None
    except (tarfile.TarError, OSError, EOFError) as error:
        remedy = "`kernel-agent pack RUN` makes one."
        raise InputError(f"this is no tar file: {error}", remedy=remedy, path=archive) from error
    with tar:
        yield tar


def _plain_files(tar: tarfile.TarFile, archive: Path) -> dict[PurePosixPath, tarfile.TarInfo]:
    """The files of an archive by name. Raises `InputError` for anything else in it."""
    found: dict[PurePosixPath, tarfile.TarInfo] = {}
    size = 0
    for member in _members(tar, archive):
        name = PurePosixPath(member.name)
        parts = member.name.split("/")
        if member.isdir() and ".." not in parts and not name.is_absolute():
            continue
        why = ""
        if name.is_absolute() or "\\" in member.name or "\0" in member.name:
            why = "has an absolute path"
        elif ".." in parts:
            why = "leads out of its folder"
        elif not member.isreg():
            why = "is a link or a device, not a file"
        elif name in found:
            why = "stands twice"
        size += member.size
        if not why and size > LARGEST:
            why = f"makes it larger than {LARGEST >> 30} GiB"
        if why:
            raise InputError(
                f"{member.name!r} in it {why}", remedy="Unpack only what `kernel-agent pack` made.", path=archive
            )
        found[name] = member
    return found


def _members(tar: tarfile.TarFile, archive: Path) -> list[tarfile.TarInfo]:
    try:
        return tar.getmembers()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InputError(f"the tar file is damaged: {error}", remedy="Copy it again.", path=archive) from error


def _run_in(members: dict[PurePosixPath, tarfile.TarInfo], archive: Path) -> PurePosixPath:
    """Where the one run of an archive lies: `<stem>-<hash8>/runs/<run-id>`."""
    runs = [name.parent for name in members if name.name == "trace.jsonl" and len(name.parts) == 4]
    if len(runs) != 1 or runs[0].parts[1] != "runs" or any(name.parts[0] != runs[0].parts[0] for name in members):
        raise InputError("it does not hold one run", remedy="`kernel-agent pack RUN` makes such a file.", path=archive)
    return runs[0]


def _delivered(folder: RunFolder) -> tuple[str, ...]:
    """Names of the files that a run delivered, relative to the folder of its product."""
    found = [entry.event.files for entry in read_ledger(folder.ledger).entries if isinstance(entry.event, ev.Delivered)]
    names = [PurePosixPath(name) for name in (found[-1] if found else ())]
    return tuple(str(name) for name in names if not name.is_absolute() and ".." not in name.parts)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the user and group of this machine."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
