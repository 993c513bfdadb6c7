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
        """Take the place of the stand-in's streams that are not the current one. Those that exist are the user's."""
        default = torch.cuda.default_stream
        made: Any = type(torch.cuda.current_stream())
        one = self

        class Stream(made):  # type: ignore[misc]
            """A stream that may be refused."""

            def __new__(cls, *args: object, **kwargs: object) -> Any:
                """Raises `UnsupportedOp` in the candidate's part."""
                one._refuse("a stream of its own (torch.cuda.Stream)")
                return super().__new__(cls, *args, **kwargs)

        def current_stream(_device: object = None) -> Any:
            """The stand-in's, which is a `torch.cuda.Stream` by its new name."""
            return made.__new__(Stream)

        def default_stream(device: object = None) -> Any:
            """The stand-in's. Raises `UnsupportedOp` in the candidate's part."""
            one._refuse("the default stream (torch.cuda.default_stream), which need not be the caller's")
            return default(device)

        torch.cuda.Stream = Stream
        torch.cuda.current_stream, torch.cuda.default_stream = current_stream, default_stream
        self.refuses = True

    def _refuse(self, what: str) -> None:
        if self.refuses:
            raise UnsupportedOp(
                f"{what}: whoever reads the gradient does not wait for it; launch on the current stream"
            )
