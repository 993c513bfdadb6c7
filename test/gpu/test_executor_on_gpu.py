"""The executor on a real device gives what it gives on the CPU, without waiting at accesses.

Also run where Triton could launch the kernels: the stand-in must not fight with the real `torch.cuda`.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import triton
import triton.language as tl
from corpus.case import Case, Outcome, error, run
from corpus.test_corpus import CASES
from torch import Tensor

from kernel_agent.ir import ExecOptions, FindingKind, execute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="computes on a CUDA device: there is none"),
    # torch's own, once per thread of its autograd engine whose first work is a matrix product; it then sets the context
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]

CLOSE = 1e-12
"""Sums of float64 in another order."""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_corpus_kernel_gives_on_the_device_what_it_gives_on_the_cpu(case: Case):
    here, there = run(case), run(case, options=ExecOptions(device=torch.device("cuda")))
    for place, (got, want) in enumerate(zip(there.outputs, here.outputs, strict=True)):
        assert got.device.type == "cuda", f"output {place} was computed elsewhere"
        assert error(got.cpu(), want) <= CLOSE, f"output {place}"
    for place, want in here.gradients.items():
        assert error(there.gradients[place].cpu(), want) <= CLOSE, f"gradient of argument {place}"
    assert there.findings == here.findings == ()


@triton.jit
def _attention(Q, K, V, Y, n, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    base = tl.program_id(1) * n * D
    q = tl.load(Q + base + rows[:, None] * D + d[None, :], mask=rows[:, None] < n, other=0.0)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    out = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, n, BLOCK):
        c = start + tl.arange(0, BLOCK)
        k = tl.load(K + base + c[:, None] * D + d[None, :], mask=c[:, None] < n, other=0.0)
        v = tl.load(V + base + c[:, None] * D + d[None, :], mask=c[:, None] < n, other=0.0)
        s = tl.where(c[None, :] < n, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        decay = tl.exp(top - higher)
        total = total * decay + tl.sum(p, 1)
        out = out * decay[:, None] + tl.dot(p, v)
        top = higher
    tl.store(Y + base + rows[:, None] * D + d[None, :], out / total[:, None], mask=rows[:, None] < n)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads, n, width = q.shape
    y = torch.empty_like(q)
    _attention[(triton.cdiv(n, 64), heads)](q, k, v, y, n, width**-0.5, D=width, BLOCK=64)
    return y


def qkv(heads: int, n: int, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(heads, n, 64, generator=generator).to(device) for _ in range(3))


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.size(-1) ** -0.5, -1) @ v


def test_arguments_on_the_device_stay_there_and_large_shapes_are_exact():
    args = qkv(4, 2000, "cuda")
    exact = [arg.double().requires_grad_() for arg in args]
    cotangent = torch.randn(4, 2000, 64, dtype=torch.float64, device="cuda")
    exact_attention(*exact).backward(cotangent)
    done = execute(attention, args, leaves=[0, 1, 2])
    done.result.backward(cotangent)
    assert done.result.device == args[0].device
    for place, name in enumerate("qkv"):
        assert error(done.leaves[place].grad, exact[place].grad) < CLOSE, f"gradient of {name}"


def test_arguments_on_the_cpu_are_executed_there_although_a_device_is_present():
    done = execute(attention, qkv(1, 70, "cpu"), leaves=[0])
    assert done.result.device.type == done.leaves[0].device.type == "cpu"


def waits_of(call) -> int:
    """How often the host waits for the device during a call, by torch's own count."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def test_waits_are_counted():
    # the two tests below mean nothing where torch does not tell
    assert waits_of(lambda: torch.ones(3, device="cuda").sum().item()) == 1


def test_the_host_waits_as_often_for_a_long_loop_as_for_a_short_one():
    # 2 and 64 iterations with two masked loads and two products each
    short, long = qkv(2, 128, "cuda"), qkv(2, 4096, "cuda")
    plain = ExecOptions()
    execute(attention, short)  # what is set up once
    assert waits_of(lambda: execute(attention, short, options=plain)) == waits_of(
        lambda: execute(attention, long, options=plain)
    )


def test_the_backward_waits_for_nothing():
    done = execute(attention, qkv(2, 256, "cuda"), leaves=[0, 1, 2])
    cotangent = torch.ones_like(done.result)
    assert waits_of(lambda: done.result.backward(cotangent)) == 0


@pytest.mark.parametrize("memory", [1 << 22, 1 << 26])
def test_gradients_do_not_depend_on_the_memory_given(memory: int):
    args, cotangent = qkv(2, 700, "cuda"), torch.randn(2, 700, 64, dtype=torch.float64, device="cuda")
    grads = []
    for options in (ExecOptions(), ExecOptions(memory=memory)):
        done = execute(attention, args, leaves=[0, 1, 2], options=options)
        done.result.backward(cotangent)
        grads.append([leaf.grad for leaf in done.leaves.values()])
    for name, whole, cut in zip("qkv", *grads, strict=True):
        assert error(cut, whole) < CLOSE, f"gradient of {name}"


@triton.jit
def _shift(X, Y, n, by, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c + by, mask=c < n), mask=c < n)


def past_the_end(x: Tensor) -> Tensor:
    y = torch.empty(40, device=x.device)
    _shift[(3,)](x, y, 40, 3, BLOCK=16)
    return y


def onto_itself(x: Tensor) -> Tensor:
    _shift[(3,)](x, x, 36, 4, BLOCK=16)
    return x


def nothing_wrote_it(x: Tensor) -> Tensor:
    empty, y = torch.empty(40, device=x.device), torch.empty(40, device=x.device)
    _shift[(3,)](empty, y, 40, 0, BLOCK=16)
    return y


BROKEN = {
    past_the_end: FindingKind.OUT_OF_BOUNDS,
    onto_itself: FindingKind.RACE,
    nothing_wrote_it: FindingKind.UNINITIALIZED_READ,
}


@pytest.mark.parametrize("stub", BROKEN, ids=lambda stub: stub.__name__)
def test_findings_are_those_of_the_cpu(stub):
    x = torch.randn(40)
    here, there = execute(stub, (x,)), execute(stub, (x.cuda(),))
    assert BROKEN[stub] in [finding.kind for finding in here.findings]
    assert there.findings == here.findings


def test_a_device_that_is_almost_full_gets_smaller_chunks():
    # Far less is free than the options allow: chunks must shrink until they fit, and nothing may be lost on the way.
    args = qkv(8, 3000, "cuda")
    want = execute(attention, args).result
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (1 << 29), dtype=torch.uint8, device="cuda")
    try:
        got = execute(attention, args, options=ExecOptions(memory=1 << 36)).result
        assert torch.cuda.memory_reserved() > hog.numel()
        assert error(got, want) < CLOSE
    finally:
        del hog
        torch.cuda.empty_cache()


def test_random_numbers_of_the_stub_are_those_of_the_cpu():
    def stub(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        noise = torch.rand(40, device=x.device) + torch.randn_like(x)
        y = torch.empty(40, device=x.device)
        _shift[(3,)](noise, y, 40, 0, BLOCK=16)
        return y * torch.tensor([2.0], device=x.device)

    x = torch.randn(40)
    outcomes = [execute(stub, (arg,)).result.cpu() for arg in (x, x.cuda())]
    assert torch.equal(*outcomes)


def test_real_kernels_still_run_after_an_execution():
    x = torch.randn(40, device="cuda")
    execute(past_the_end, (x,))
    y = torch.empty(40, device="cuda")
    _shift[(3,)](x, y, 36, 4, BLOCK=16)
    assert torch.equal(y[:36], x[4:])
    assert isinstance(run(CASES[0]), Outcome)
