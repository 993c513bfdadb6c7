"""One sandbox for all tests of this folder, and a short way to run an entry of `sandbox_entries` in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sandbox_jobs import Run, job, wait_until_gone

from kernel_agent.sandbox import Sandbox
from kernel_agent.sandbox.process_tree import descendants


@pytest.fixture(scope="session")
def shared_sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared_sandbox: Sandbox) -> Iterator[Sandbox]:
    """Whatever a test runs in it, nothing may be left below the server afterwards."""
    yield shared_sandbox
    if shared_sandbox.server_pid is not None:
        left = wait_until_gone(descendants(shared_sandbox.server_pid))
        assert left == [], "processes were left behind"


@pytest.fixture
def run(sandbox: Sandbox) -> Run:
    return lambda name, limits=None, **payload: sandbox.run(job(name, limits, **payload))
