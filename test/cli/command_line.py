"""The command line in a process of its own, as a user without any key starts it."""

import os
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """A finished command line."""

    code: int
    out: str
    err: str


def command(*arguments, cwd):
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    full = [sys.executable, "-m", "kernel_agent", *arguments]
    return subprocess.Popen(full, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kernel_agent(*arguments, cwd):
    process = command(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)
