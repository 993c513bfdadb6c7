"""A model with two differentiable stubs trains on a GPU as its torch twin does; under torch.compile, too."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent import differentiable
from kernel_agent.compiler.kept import KeptPairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="trains on a GPU: needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch.compile warns of what it does itself
]


@triton.jit
def norm_kernel(X, W, Y, N, x_m, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(X + row * x_m + at, mask=at < N, other=0.0).to(tl.float32)
    w = tl.load(W + at, mask=at < N, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(Y + row * N + at, x * rstd * w, mask=at < N)


def norm(x, weight, eps=1e-6):
    """RMSNorm of x (M, N)."""
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    norm_kernel[(M,)](x, weight, y, N, x.stride(0), eps, BLOCK=triton.next_power_of_2(N))
    return y


@triton.jit
def gate_kernel(X, G, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(Y + at, x * tl.sigmoid(g), mask=at < n)


def gate(x, g):
    """x * sigmoid(g)."""
    x, g = x.contiguous(), g.contiguous()
    y = torch.empty_like(x)
    gate_kernel[(triton.cdiv(x.numel(), 1024),)](x, g, y, x.numel(), BLOCK=1024)
    return y


def torch_norm(x, weight, eps=1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def torch_gate(x, g):
    return (x.float() * torch.sigmoid(g.float())).to(x.dtype)


class Model(torch.nn.Module):
    """Norm, linear, gate, linear."""

    def __init__(self, norm, gate, dtype):
        super().__init__()
        self.norm, self.gate = norm, gate
        self.weight = torch.nn.Parameter(torch.ones(200, dtype=dtype))
        self.wide = torch.nn.Linear(200, 2 * 300, dtype=dtype)
        self.out = torch.nn.Linear(300, 10, dtype=dtype)

    def forward(self, x):
        a, b = self.wide(self.norm(x, self.weight)).chunk(2, dim=-1)
        return self.out(self.gate(a, b))


def trained(model, inputs, targets, steps=10):
    """The loss before every step of SGD, and the parameters behind the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = (model(inputs).float() - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    kept = KeptPairs(tmp_path_factory.mktemp("derived"))
    found = differentiable(norm), differentiable(gate)
    for one in found:
        one._kept = kept
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_trains_as_its_torch_twin(operators, dtype, compiled):
    # Wrong gradients leave the twin's path within a few steps.
    torch.manual_seed(0)
    twin = Model(torch_norm, torch_gate, dtype).cuda()
    model = Model(*operators, dtype).cuda()
    model.load_state_dict(twin.state_dict())
    inputs, targets = torch.randn(64, 200, device="cuda", dtype=dtype), torch.randn(64, 10, device="cuda")
    model(inputs).sum().backward()  # derives
    model.zero_grad()
    mine = trained(torch.compile(model) if compiled else model, inputs, targets)
    theirs = trained(twin, inputs, targets)
    tolerance = 1e-3 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(torch.tensor(mine[0]), torch.tensor(theirs[0]), rtol=tolerance, atol=tolerance)
    for ours, other in zip(mine[1], theirs[1], strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


def test_a_layout_that_is_no_rows_is_made_contiguous(operators):
    op, _ = operators
    x = torch.randn(1, 200, device="cuda", requires_grad=True)
    w = torch.ones(200, device="cuda", requires_grad=True)
    op(torch.randn(4, 200, device="cuda", requires_grad=True), w).sum().backward()
    w.grad = None
    op(x.expand(8, 200), w).sum().backward()
    mine = x.grad.clone()
    x.grad = None
    torch_norm(x.expand(8, 200), w).sum().backward()
    torch.testing.assert_close(mine, x.grad, rtol=1e-4, atol=1e-4)
