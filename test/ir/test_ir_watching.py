"""Watches over torch's operations cost no more than they must."""

from __future__ import annotations

import sys

import pytest
import torch

from kernel_agent.ir.watching import Watch


def test_a_watch_sees_operations_without_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its import takes a second in each child that looks at a reference, which was most of what such a child did.
    class Names(Watch):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # to import it raises
    with Names():
        torch.ones(2).exp()
    assert seen == ["aten::ones", "aten::exp"]
