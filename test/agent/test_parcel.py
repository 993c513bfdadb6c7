"""A run moves as one file; an archive from elsewhere can write nowhere but below the folder it is given."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from scripted import BACKWARD, SWAPPED, Script, config, reply_text

from kernel_agent.agent.events import Outcome
from kernel_agent.agent.ledger import Ledger, LedgerBusy
from kernel_agent.agent.parcel import pack, unpack
from kernel_agent.agent.runs import Changes, resume, run
from kernel_agent.errors import InputError


@pytest.fixture
def script() -> Script:
    return Script(reply_text(SWAPPED), reply_text(BACKWARD))


@pytest.fixture
def red(script: Script, tmp_path: Path) -> Path:
    """A run that ended red after its one ask."""
    return run(config(tmp_path / "here", max_iters=1), tools=script.tools, model=script.model).folder.path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_packed_run_goes_on_elsewhere(red: Path, script: Script, tmp_path: Path) -> None:
    moved = unpack(pack(red, tmp_path / "run.tar"), tmp_path / "there")
    assert contents(moved.path) == contents(red)
    finished = resume(moved.path, changes=Changes(max_iters=2), tools=script.tools, model=script.model)
    assert finished.outcome is Outcome.DELIVERED
    assert len(script.asked) == 2, "the first reply came along and is not asked for again"
    assert finished.folder.product == tmp_path / "there" / red.parent.parent.name


def test_latest_points_to_the_unpacked_run(red: Path, tmp_path: Path) -> None:
    moved = unpack(pack(red, tmp_path / "run.tar"), tmp_path / "there")
    assert (moved.path.parent / "latest").resolve() == moved.path


@pytest.mark.parametrize("name", ["", "runs/latest"], ids=["the delivery folder", "latest"])
def test_any_name_of_a_run_packs_it(name: str, red: Path, tmp_path: Path) -> None:
    moved = unpack(pack(red.parent.parent / name, tmp_path / "run.tar"), tmp_path / "there")
    assert moved.run_id == red.name


def test_what_was_delivered_comes_along(red: Path, script: Script, tmp_path: Path) -> None:
    done = resume(red, changes=Changes(max_iters=2), tools=script.tools, model=script.model)
    moved = unpack(pack(red, tmp_path / "run.tar"), tmp_path / "there")
    assert done.state.delivered is not None
    assert [name for name in done.state.delivered.files if not (moved.product / name).is_file()] == []


def test_no_file_is_overwritten(red: Path, tmp_path: Path) -> None:
    archive = pack(red, tmp_path / "run.tar")
    with pytest.raises(InputError, match="not overwritten"):
        pack(red, archive)
    unpack(archive, tmp_path / "there")
    with pytest.raises(InputError, match="here already"):
        unpack(archive, tmp_path / "there")


def test_a_run_that_is_being_worked_on_is_not_packed(red: Path, tmp_path: Path) -> None:
    # Half of an event, or an ask without its event, would be packed.
    with Ledger.open(red / "trace.jsonl"), pytest.raises(LedgerBusy):
        pack(red, tmp_path / "run.tar")
    assert list(tmp_path.glob("*.tar*")) == []


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (member("/tmp/escaped"), "absolute path"),
        (member("x-1/../../escaped"), "leads out"),
        (member("x-1/..", tarfile.DIRTYPE), "leads out"),
        (member("x-1/link", tarfile.SYMTYPE, "/etc/passwd"), "link or a device"),
        (member("x-1/link", tarfile.LNKTYPE, "x-1/runs/r/trace.jsonl"), "link or a device"),
        (member("x-1/device", tarfile.CHRTYPE), "link or a device"),
        (member("x-1/pipe", tarfile.FIFOTYPE), "link or a device"),
        (member("x-1/runs/r/trace.jsonl"), "stands twice"),
        (member("other/file"), "does not hold one run"),
        (member("x-1/runs/second/trace.jsonl"), "does not hold one run"),
    ],
    ids=lambda value: value.name if isinstance(value, tarfile.TarInfo) else "",
)
def test_an_archive_with_anything_but_plain_files_of_one_run_is_refused_whole(
    bad: tarfile.TarInfo, why: str, tmp_path: Path
) -> None:
    archive = tmp_path / "bad.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(member("x-1/runs/r/trace.jsonl"), io.BytesIO())
        tar.addfile(bad, io.BytesIO())
    with pytest.raises(InputError, match=why):
        unpack(archive, tmp_path / "there")
    assert not (tmp_path / "there").exists(), "nothing was written before all of it was looked at"
    assert not (tmp_path / "escaped").exists()


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel_agent.agent.parcel.LARGEST", 1000)
    archive = tmp_path / "large.tar"
    large = member("x-1/runs/r/trace.jsonl")
    large.size = 1001
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(large, io.BytesIO(bytes(1001)))
    with pytest.raises(InputError, match="larger than"):
        unpack(archive, tmp_path / "there")


@pytest.mark.parametrize("text", [b"", b"no tar", b"x" * 1024], ids=["empty", "short", "long"])
def test_a_file_that_is_no_archive_is_told(text: bytes, tmp_path: Path) -> None:
    archive = tmp_path / "file"
    archive.write_bytes(text)
    with pytest.raises(InputError, match=r"tar file|one run"):
        unpack(archive, tmp_path / "there")
