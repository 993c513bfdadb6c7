"""Lowers a first kernel when it is imported, as the fork server does: what that takes once, no child takes again."""

from contextlib import suppress

from kernel_agent.errors import EnvironmentProblem
from kernel_agent.ir.lower import self_test

with suppress(EnvironmentProblem):  # the child that needs a kernel tells of it
    self_test()
