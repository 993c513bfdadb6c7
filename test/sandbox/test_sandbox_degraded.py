"""A machine that lacks a wall still runs jobs, and says loudly what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sandbox_jobs import PATHS

from kernel_agent.sandbox import landlock

# A kernel takes sixteen layers of Landlock and refuses the next: behind sixteen permissive ones, a child gets none.
SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from kernel_agent.sandbox import Sandbox, landlock, linux
from sandbox_jobs import job

def main():
    linux.forbid_new_privileges()
    for _ in range(16):
        landlock.restrict([(Path("/"), landlock.Right((1 << 16) - 1))])
    with Sandbox(preload=("torch",)) as sandbox:
        report = sandbox.run(job("say_nothing"))
        sandbox.run(job("say_nothing"))
    print(report.ending.value, *(wall.name for wall in report.protections if not wall.active), sep=",")

main()
"""


@pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock to take away")
def test_a_job_runs_without_landlock_and_the_absence_is_said_once() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(paths=PATHS)], capture_output=True, text=True, check=True
    )
    ending, *missing = process.stdout.strip().split(",")
    assert ending == "FINISHED"
    assert "Landlock" in missing
    assert process.stderr.count("less protection than intended") == 1
    assert "Landlock" in process.stderr
