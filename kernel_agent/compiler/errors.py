"""Errors of the compiler."""

from __future__ import annotations

from kernel_agent.errors import InputError, InternalError

OTHER_CONFIGURATIONS = "derived for other configurations of the forward: add one like this call to SWEEP"
"""What a derived backward says where a call compiles other programs than those it was derived from."""

WIDER_FLOATS = "derived for wider floats: add an entry with this dtype to SWEEP"
"""And where what the forward's kernels convert shows in no call that it was derived from."""


class CannotDerive(InputError):
    """No backward can be derived of a forward, or of a part of it, and why; the remedy says what the user can do.

    Passes raise it for what they cannot prove: the plan before them stands then.
    """


class NotThisTime(CannotDerive):
    """No backward was proven for want of time or memory, or because of a defect: another try may end otherwise."""


class DoesNotApply(CannotDerive):
    """There is nothing in a kernel for a schedule to change."""


class RefusedNatively(CannotDerive):
    """A backward that is proven in exact arithmetic is refused by the GPU of this machine, and why."""


class OutOfBounds(InternalError):
    """A kernel that the compiler evaluated accesses an element that is not there."""
