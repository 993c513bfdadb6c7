"""Ranges and marks for a profiler, which GPU code sets around its launches: a torch without CUDA lacks them."""

from __future__ import annotations


class ProfiledRanges:
    """What `torch.cuda.nvtx` calls, where nobody profiles."""

    def rangePushA(self, _message: str) -> int:
        """Depth of the range that begins."""
        return 0

    def rangePop(self) -> int:
        """Depth of the range that ends."""
        return 0

    def rangeStartA(self, _message: str) -> int:
        """Handle of a range that another thread may end."""
        return 0

    def rangeEnd(self, _handle: int) -> None:
        """The end of a range by its handle."""

    def markA(self, _message: str) -> None:
        """A point in time."""
