"""What the warden reads of processes."""

from __future__ import annotations

import os
import subprocess
import sys

from kernel_agent.sandbox.process_tree import usage

_NAMED_LIKE_A_LINE = """
import sys
from kernel_agent.sandbox.linux import name_process
name_process("\\nThreads:\\t9")
print("named", flush=True)
sys.stdin.read()
"""


def test_a_process_cannot_say_by_its_name_what_it_uses() -> None:
    # A name is what a child chooses: read as a line of its own it would hide memory and threads, or blame for some.
    command = [sys.executable, "-c", _NAMED_LIKE_A_LINE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        assert usage([process.pid]).threads == len(os.listdir(f"/proc/{process.pid}/task"))
        process.kill()


def test_what_has_ended_uses_nothing() -> None:
    # The warden asks for processes that it saw a moment ago: one that has gone must not end it.
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert usage([process.pid]).processes == 0
