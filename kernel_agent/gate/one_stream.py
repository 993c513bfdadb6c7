"""No streams but the caller's in what a candidate adds: whoever reads the gradient waits for no other.

The executor does everything when it is asked for, so that a backward which forgets to wait would look right.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_agent.ir import UnsupportedOp


class OneStream:
    """Refuses new streams on the stand-in device from `begin` on, except where the user's own stub may make them."""

    def __init__(self) -> None:
        self.refuses = False

    def begin(self) -> None:
        """Take the place of the stand-in's `torch.cuda.Stream`. Streams that exist already are the user's."""
        made = torch.cuda.Stream
        one = self

        class Stream(made):  # type: ignore[misc, valid-type]
            """A stream that may be refused."""

            def __new__(cls, *args: object, **kwargs: object) -> Any:
                """Raises `UnsupportedOp` in the candidate's part."""
                if one.refuses:
                    raise UnsupportedOp(
                        "a stream of its own (torch.cuda.Stream): whoever reads the gradient does not wait for it; "
                        "launch on the current stream"
                    )
                return super().__new__(cls, *args, **kwargs)

        torch.cuda.Stream = Stream
        self.refuses = True
