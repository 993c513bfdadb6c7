"""Errors of stubs that train."""

from __future__ import annotations

from kernel_agent.errors import InputError


class CannotTrain(InputError):
    """A call of a differentiable stub for which no proven backward can be had, and what the user can do instead."""
