"""`kernel-agent new` turns a bare kernel file into one that can be read and observed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernel_agent.errors import InputError
from kernel_agent.pairs.scaffold import scaffold
from kernel_agent.pairs.spec import KernelSpec

BARE = '''"""Matrix product."""
import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(A, B, C, M, N, K, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    a = tl.load(A + row * K + k, mask=k < K, other=0.0)
    b = tl.load(B + k * N + col, mask=k < K, other=0.0)
    tl.store(C + row * N + col, tl.sum(a * b, axis=0))


def launch(a, b, c, M, N, K):
    matmul_kernel[(M, N)](a, b, c, M, N, K, BLOCK=triton.next_power_of_2(K))


def matmul(a, b, alpha=1.0):
    M, K = a.shape
    _, N = b.shape
    c = torch.empty(M, N, device=a.device)
    launch(a, b, c, M, N, K)
    return c


def test_matmul():
    matmul(torch.ones(2, 2), torch.ones(2, 2))
'''


def test_the_scaffold_can_be_observed_at_once(observed: Callable[..., KernelSpec]) -> None:
    spec = observed(scaffold(BARE))
    assert spec.facts.stub == "matmul"
    assert spec.grads == ("a", "b")
    assert [item.shape for item in spec.inputs] == [(17, 100), (100, 3)]


def test_nothing_of_the_file_is_changed_but_what_is_added() -> None:
    added = scaffold(BARE)
    kept = [line for line in added.splitlines() if line in BARE.splitlines()]
    assert [line for line in kept if line] == [line for line in BARE.splitlines() if line]
    assert "@autodiff\ndef matmul(a, b, alpha=1.0):" in added


def test_what_the_file_has_is_left_alone() -> None:
    text = BARE + "\n\nSWEEP = [dict(M=2, K=2, N=2)]\n\n\ndef make_args(M, K, N):\n    return ()\n"
    assert scaffold(text).count("SWEEP") == 1
    assert scaffold(text).count("def make_args") == 1


def test_vectors_follow_the_last_dim_and_keyword_only_arguments_are_passed_by_name() -> None:
    text = BARE.replace("def matmul(a, b, alpha=1.0):", "def matmul(a, b, bias, *, factor, alpha=1.0):")
    text = text.replace("_, N = b.shape", "_, N = b.shape\n    bias.contiguous()")
    added = scaffold(text)
    assert "bias = torch.randn(K, device=device)" in added
    assert "return (a, b, bias), dict(factor=factor)" in added


def test_a_marked_file_needs_no_scaffold() -> None:
    with pytest.raises(InputError, match="is marked with @autodiff already"):
        scaffold(scaffold(BARE))


def test_a_kernel_without_a_stub_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="no function of the file launches a kernel"):
        scaffold(BARE[: BARE.index("def launch")])


def test_a_file_without_kernels_says_so() -> None:
    with pytest.raises(InputError, match="has no @triton"):
        scaffold("import torch\n")
