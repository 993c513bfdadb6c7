"""Whether a child of the sandbox could read a folder: asked before what candidates must not see is put there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernel_agent.sandbox.confinement import system_paths
from kernel_agent.sandbox.job import Protection
from kernel_agent.sandbox.protection import protections


def why_reachable(folder: Path, walls: Sequence[Protection] | None = None) -> str:
    """Why a job whose `readable` does not name the folder may read it; empty when nothing lets it.

    `walls` are this machine's protections; None: they are found out, which takes about a second.
    """
    active = {wall.name: wall for wall in (protections() if walls is None else walls) if wall.active}
    if "Landlock" not in active:
        return "this machine has no Landlock, so a child can read every file of this user"
    place = folder.resolve()
    for path in system_paths():
        open_to_children = path.resolve()
        if place == open_to_children or open_to_children in place.parents:
            return f"it lies in {path}, which every child may read"
        if place in open_to_children.parents:
            return f"{path}, which every child may read, lies in it"
    return ""
