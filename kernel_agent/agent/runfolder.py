"""`RunFolder`: where the files of one run lie. It holds no absolute path, so it can be moved or packed.

<out>/<stem>-<hash8>/            the delivered files
    runs/<run-id>/trace.jsonl    the ledger
                  trace.md       the same for reading
                  asks/0001.md, replies/0001.md, replies/0001.json, snapshots/<digest>.py
                  source.py      the user's file as it was
                  cache/         what is computed once for the run; it goes on without, only later
    runs/latest -> <run-id>
"""

from __future__ import annotations

import os
import secrets
import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from kernel_agent.errors import InputError

LATEST = "latest"


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path
    """The folder itself, `.../runs/<run-id>`."""

    @classmethod
    def plan(cls, out: Path, stem: str, hash8: str) -> RunFolder:
        """A folder for a new run; nothing is on disk before `create`."""
        run_id = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
        return cls(out / f"{stem}-{hash8}" / "runs" / run_id)

    def create(self, source: str) -> None:
        """Make the folder with a copy of the user's file in it and point `latest` at it."""
        self.path.mkdir(parents=True)
        for part in (self.asks, self.replies, self.snapshots):
            part.mkdir()
        self.source.write_text(source, encoding="utf-8")
        self.point_latest()

    def point_latest(self) -> None:
        """Let `latest` be this run."""
        fresh = self.path.with_name(f".{self.run_id}.link")
        fresh.symlink_to(self.run_id)
        os.replace(fresh, self.path.with_name(LATEST))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run; `latest` and the folder that holds `runs` are resolved. Raises `InputError`."""
        for candidate in (path, path / "runs" / LATEST):
            if (candidate / "trace.jsonl").is_file():
                return cls(candidate.resolve())
        raise InputError("this is not the folder of a run", remedy="`kernel-agent runs` lists them", path=path)

    @property
    def run_id(self) -> str:
        """UTC time of the start and a short random suffix: sorts by time."""
        return self.path.name

    @property
    def product(self) -> Path:
        """`<out>/<stem>-<hash8>`: where the finished operator goes."""
        return self.path.parent.parent

    @property
    def resume_command(self) -> str:
        """The command line that goes on with the run."""
        return f"kernel-agent resume {shlex.quote(str(self.path))}"

    @property
    def ledger(self) -> Path:
        """The events."""
        return self.path / "trace.jsonl"

    @property
    def trace(self) -> Path:
        """The events for reading."""
        return self.path / "trace.md"

    @property
    def asks(self) -> Path:
        """Prompts as sent, whole."""
        return self.path / "asks"

    @property
    def replies(self) -> Path:
        """Replies as received."""
        return self.path / "replies"

    @property
    def snapshots(self) -> Path:
        """Candidates by content."""
        return self.path / "snapshots"

    @property
    def cache(self) -> Path:
        """What was computed once for the run."""
        return self.path / "cache"

    @property
    def source(self) -> Path:
        """The user's file as it was when the run began."""
        return self.path / "source.py"
