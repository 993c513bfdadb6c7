"""A watch over torch's operations that leaves torch's compiler out: imported for it, that took a second per process."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """A `TorchDispatchMode` for code that is never compiled.

    torch disables `__torch_dispatch__` of every mode for its compiler, and imports it for that at the first operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
