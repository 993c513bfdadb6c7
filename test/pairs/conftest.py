"""One small user's file that the tests of this room vary, and ways to read and observe such a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.spec import FileFacts, KernelSpec
from kernel_agent.pairs.userfile import read_file

SCALE = '''"""Multiply by a number. A second sentence."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def scale_kernel(X, Y, factor, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < N) * factor, mask=at < N)


@autodiff
def scale(x, factor=2.0):
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 16),)](x, y, factor, x.numel(), BLOCK=16)
    return y


SWEEP = [dict(N=40), dict(N=7)]


def make_args(N, device="cuda"):
    return (torch.randn(N, device=device),)


def reference(x, factor=2.0):
    return x * factor
'''


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def scale_text() -> str:
    """The file that works."""
    return SCALE


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., FileFacts]:
    """Write a text, with (old, new) replacements that must apply, to a file and read it."""

    def reader(text: str = SCALE, *changes: tuple[str, str], name: str = "scale.py") -> FileFacts:
        for old, new in changes:
            assert old in text, f"{old!r} is not in the text to change"
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text)
        return read_file(path)

    return reader


@pytest.fixture
def observed(read: Callable[..., FileFacts]) -> Callable[..., KernelSpec]:
    """Write, read and observe. Runs in this process: the texts are ours."""
    return lambda *args, **kwargs: observe(read(*args, **kwargs))
