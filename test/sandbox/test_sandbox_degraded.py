"""A machine that lacks a wall still runs jobs, and says loudly what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_jobs import PATHS

from kernel_agent.sandbox import landlock

PAIR = Path(__file__).resolve().parents[1] / "gate" / "pairs" / "softmax.py"
# A kernel takes sixteen layers of Landlock and refuses the next: behind sixteen permissive ones, a child gets none.
SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from kernel_agent.gate import GateOptions, check
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox, landlock, linux
from sandbox_jobs import job

def main():
    pair = Path({pair!r})
    linux.forbid_new_privileges()
    for _ in range(16):
        landlock.restrict([(Path("/"), landlock.Right((1 << 16) - 1))])
    with Sandbox(preload=("torch",)) as sandbox:
        report = sandbox.run(job("say_nothing"))
        sandbox.run(job("say_nothing"))
    with Sandbox() as sandbox:
        spec = describe(read_file(pair), sandbox)
        verdict = check(spec, pair.read_text(), sandbox, GateOptions(max_cases=1, odd_sizes=0))
    print(verdict.status.value, *verdict.notes)
    print(report.ending.value, *(wall.name for wall in report.protections if not wall.active), sep=",")

main()
"""


@pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock to take away")
def test_a_job_runs_without_landlock_and_the_absence_is_said_once() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(paths=PATHS, pair=str(PAIR))], capture_output=True, text=True, check=True
    )
    verdict, endings = process.stdout.strip().splitlines()
    assert verdict.startswith("GREEN")
    assert "no Landlock here" in verdict, "what protects nobody is said with the verdict too"
    assert "nothing stops reading and changing files of yours" in verdict
    ending, *missing = endings.split(",")
    assert ending == "FINISHED"
    assert "Landlock" in missing
    assert process.stderr.count("less protection than intended") == 2, "once for each sandbox"
    assert "Landlock" in process.stderr
