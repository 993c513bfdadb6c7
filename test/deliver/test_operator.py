"""The delivered operator as PyTorch uses it: one graph used twice, checkpoints, autocast, gradients of gradients."""

import json
import os
import subprocess
import sys

import pytest

from kernel_agent.deliver import Provenance, deliver
from kernel_agent.gate.verdict import CaseResult, Status, Verdict
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, Candidate, KernelSpec, ShapeEntry
from kernel_agent.pairs.userfile import read_file

FORWARD = '''"""A square, and a product that torch computes, as a stub may."""
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff

SWEEP = [{"N": 8}]


def make_args(N, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(N, N, generator=generator).to(device) for _ in range(2))


@triton.jit
def square_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N)
    tl.store(Y + at, x * x, mask=at < N)


@autodiff
def square(x, w):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y @ w


def reference(x, w):
    return (x * x) @ w
'''
BACKWARD = """
@triton.jit
def square_bwd(G, X, DX, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = at < N
    tl.store(DX + at, 2.0 * tl.load(X + at, mask=m) * tl.load(G + at, mask=m), mask=m)


def backward(saved, grad_y, needs=None):
    x, w = saved[:2]
    g = (grad_y @ w.t()).contiguous()
    dx = torch.empty_like(x)
    square_bwd[(triton.cdiv(g.numel(), 64),)](g, x, dx, g.numel(), BLOCK=64)
    return dx, (x * x).t() @ grad_y
"""
BEFORE = """
import json
import torch
from torch.utils.checkpoint import checkpoint
from square_backward import square_autograd as square

torch.manual_seed(0)
x = torch.randn(8, 8, requires_grad=True)
w = torch.randn(8, 8, requires_grad=True)
g = torch.randn(8, 8)


def grads(y, **kwargs):
    return torch.autograd.grad(y, (x, w), g, **kwargs)


def same(found):
    return all(map(torch.equal, found, plain))


def error(call):
    try:
        call()
    except RuntimeError as raised:
        return str(raised)
    return "none"


def checkpointed(reentrant):
    x.grad = w.grad = None
    checkpoint(square, x, w, use_reentrant=reentrant).backward(g)
    return x.grad, w.grad


half = torch.autocast("cpu", dtype=torch.bfloat16)
said = {}
plain = grads(square(x, w))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operator")
    file = folder / "square.py"
    file.write_text(FORWARD)
    tensor = {"kind": ArgumentKind.TENSOR, "dtype": "float32", "shape": (8, 8), "needs_grad": True}
    spec = KernelSpec(
        facts=read_file(file),
        sweep=(ShapeEntry(dims={"N": 8}),),
        inputs=tuple(ArgumentFacts(name=name, **tensor) for name in ("x", "w")),
        outputs=(ArgumentFacts(name="y", **tensor),),
        returns_tuple=False,
        grads=("x", "w"),
        launches=("square_kernel",),
    )
    green = CaseResult(case="N=8", required=True, status=Status.GREEN)
    verdict = Verdict(status=Status.GREEN, cases=(green,), cases_planned=1)
    deliver(spec, Candidate(backward=BACKWARD), verdict, Provenance(backend="manual", model="", asks=1), folder)
    return folder


TRAINING = {
    "second backward": "y = square(x, w); a = grads(y, retain_graph=True); b = grads(y); told = same(a) and same(b)",
    "freed graph": "y = square(x, w); grads(y); told = error(lambda: grads(y))",
    "checkpoint": "told = same(checkpointed(False))",
    "reentrant checkpoint": "told = same(checkpointed(True))",
    "autocast": "with half: y = square(x, w); a = grads(y)\ntold = y.dtype is torch.float32 and same(a)",
    "backward under autocast": "y = square(x, w)\nwith half: a = grads(y)\ntold = same(a)",
    "twice": "dx = grads(square(x, w), create_graph=True)[0]\ntold = error((dx.square().sum() + x.sum()).backward)",
    "kept graph": "told = same(grads(square(x, w), create_graph=True))",
    "one alone": "told = torch.equal(torch.autograd.grad(square(x.detach(), w), w, g, create_graph=True)[0], plain[1])",
}
"""What is done with the operator; all in one process, which costs seconds to start."""


@pytest.fixture(scope="module")
def told(folder):
    """What each line of `TRAINING` says, on interpreted kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    text = BEFORE + "".join(f"{code}\nsaid[{name!r}] = told\n" for name, code in TRAINING.items())
    command = [sys.executable, "-W", "error", "-c", text + "print(json.dumps(said))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_backward_through_a_retained_graph_gives_the_same(told):
    # A backward that writes over what was saved is right once.
    assert told["second backward"] is True


def test_a_second_backward_through_a_freed_graph_is_pytorchs_own_error(told):
    # Tensors kept beside `save_for_backward` would outlive the graph unseen.
    assert "a second time" in told["freed graph"]


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant checkpoint"])
def test_under_a_checkpoint_gradients_are_the_same(told, kind):
    assert told[kind] is True


@pytest.mark.parametrize("kind", ["autocast", "backward under autocast"])
def test_under_autocast_it_computes_what_was_proven(told, kind):
    # The product of the stub and those of the backward would be taken in bfloat16, which no gate has seen.
    assert told[kind] is True


def test_a_gradient_differentiated_again_is_an_error(told):
    # PyTorch's own mark of functions to differentiate once lets a penalty on the gradient count as a constant.
    assert "cannot be differentiated again" in told["twice"]


def test_a_graph_of_gradients_that_nobody_differentiates_is_no_error(told):
    # Some training loops ask for a graph always.
    assert told["kept graph"] is True
    assert told["one alone"] is True
