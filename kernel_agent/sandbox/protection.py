"""Which walls this machine can put around a child, found out by putting them up in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from kernel_agent.sandbox import environment
from kernel_agent.sandbox.job import Protection

_PROBE = """
import sys
sys.path[:] = sys.argv[2].split(":")
import json, os
from pathlib import Path
from kernel_agent.sandbox.confinement import confine
from kernel_agent.sandbox.job import Limits
from kernel_agent.sandbox.namespaces import leave_mounts, leave_processes

scratch = Path(sys.argv[1])
alone = leave_processes(())
child = os.fork()
if child == 0:
    mounts = leave_mounts(scratch, (), own_processes=alone.wall.active)
    walls = (alone.wall, mounts, *confine(scratch, (), Limits()))
    os.write(1, json.dumps([wall.model_dump() for wall in walls]).encode())
    os._exit(0)
os.waitpid(child, 0)
"""
"""As the warden does it, with nothing watched."""


def missing_walls(walls: Sequence[Protection]) -> tuple[str, ...]:
    """A sentence for every wall that does not stand, with what is open without it."""
    return tuple(
        f"no {wall.name} here ({wall.detail}): nothing stops {wall.stops}" for wall in walls if not wall.active
    )


def protections() -> tuple[Protection, ...]:
    """Every protection, in the order of application, as a child on this machine would have it. Takes about a second."""
    if not sys.platform.startswith("linux"):
        return (Protection(name="sandbox", active=False, detail="needs Linux"),)
    search_path = ":".join(os.path.abspath(entry) for entry in sys.path)
    with tempfile.TemporaryDirectory(prefix="kernel-agent-") as scratch:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE, scratch, search_path],
            env=environment.scrubbed(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    if probe.returncode != 0:
        return (Protection(name="sandbox", active=False, detail=probe.stderr.strip()[-1000:]),)
    return tuple(Protection.model_validate(wall) for wall in json.loads(probe.stdout))
