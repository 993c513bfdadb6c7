"""Snapshots: every candidate of a run as a file named by its content. Rolling back means picking one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.spec import Candidate
from kernel_agent.wholefile import write_once

FORWARD = "# --- forward ---\n"
BACKWARD = "# --- backward ---\n"
TORCH = "# torch: "


@dataclass(frozen=True)
class Snapshots:
    """The candidates in one folder."""

    folder: Path

    def path(self, digest: str) -> Path:
        """Where the candidate with this digest lies."""
        return self.folder / f"{digest[:16]}.py"

    def put(self, candidate: Candidate) -> str:
        """Store a candidate and return its digest, blank lines around its sections aside. It is stored once."""
        forward = _trimmed(candidate.forward or "") or None
        candidate = candidate.model_copy(update={"backward": _trimmed(candidate.backward), "forward": forward})
        write_once(self.path(candidate.digest), render(candidate))
        return candidate.digest

    def get(self, digest: str) -> Candidate:
        """The candidate with this digest. Raises `InputError` when the file is gone or was edited."""
        path = self.path(digest)
        if not path.is_file():
            raise InputError("this snapshot is missing", remedy="restore the run folder, or start a new run", path=path)
        candidate = parse(path.read_bytes().decode("utf-8"))  # as text, a lone carriage return would change
        if candidate.digest != digest:
            raise InputError(
                "this snapshot was edited after it was judged", remedy="start a new run from the edited file", path=path
            )
        return candidate


def render(candidate: Candidate) -> str:
    """A candidate as text: its sections under their markers, and above them the torch functions that it declares."""
    declared = f"{TORCH}{', '.join(candidate.torch_ops)}\n" if candidate.torch_ops else ""
    forward = "" if candidate.forward is None else f"{FORWARD}{candidate.forward}"
    return f"{declared}{forward}{BACKWARD}{candidate.backward}"


def parse(text: str) -> Candidate:
    """Inverse of `render`."""
    forward, _, backward = f"\n{text}".partition(f"\n{BACKWARD}")
    forward = f"{forward}\n".removeprefix("\n")
    declared: tuple[str, ...] = ()
    if forward.startswith(TORCH):
        line, _, forward = forward.partition("\n")
        declared = tuple(line.removeprefix(TORCH).split(", "))
    return Candidate(backward=backward, forward=forward.removeprefix(FORWARD) or None, torch_ops=declared)


def _trimmed(text: str) -> str:
    return text.strip("\n") + "\n" if text.strip() else ""
