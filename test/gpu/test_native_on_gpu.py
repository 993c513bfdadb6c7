"""The native tier on a real device: honest kernels pass, coarse, unwritten and wild ones do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import silu_pair
import torch

from kernel_agent.bench.narrow import NarrowArithmetic
from kernel_agent.bench.native import check_native
from kernel_agent.bench.rig import Rig
from kernel_agent.gate import Status, Verdict
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
PROVEN = (
    *(f"test/gate/pairs/{name}.py" for name in ("layernorm", "matmul_bias", "softmax", "two_outputs")),
    "datasets/kernel_pairs/attention/fa2_causal.py",
    "datasets/kernel_pairs/matmul/matmul_splitk_dw.py",
    "datasets/kernel_pairs/norm_row/rmsnorm_per_head.py",
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs real kernels: needs a CUDA device"),
    # torch's own, once per thread of its autograd engine whose first work is a matrix product; it then sets the context
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]


@pytest.fixture(scope="module")
def rig(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(silu_pair.spec_of(tmp_path_factory.mktemp("silu"), sandbox), sandbox)


def verdict_on(rig: Rig, backward: str) -> Verdict:
    return check_native(rig.spec, silu_pair.pair(backward), rig.sandbox, rig)


def test_narrow_arithmetic_reaches_backwards_on_the_device():
    # autograd computes there in a thread of its own; honest errors would come out as zero if the mode stayed behind
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(64, 64, generator=generator, dtype=torch.float64) for _ in range(3))
    grads = {}
    for device in ("cpu", "cuda"):
        leaf = x.to(device).requires_grad_()
        product = leaf @ w.to(device)
        (exact,) = torch.autograd.grad(product, leaf, g.to(device), retain_graph=True)
        with NarrowArithmetic(8, narrow=True):
            (narrow,) = torch.autograd.grad(product, leaf, g.to(device))
        assert 1e-4 < float((narrow - exact).norm() / exact.norm()) < 1e-2
        grads[device] = narrow.cpu()
    assert torch.allclose(grads["cpu"], grads["cuda"], rtol=1e-5)


@pytest.mark.parametrize("path", PROVEN, ids=lambda path: Path(path).stem)
def test_real_kernels_of_a_proven_pair_are_green(path: str, sandbox: Sandbox):
    spec = describe(read_file(ROOT / path), sandbox)
    verdict = check_native(spec, spec.facts.source, sandbox)
    assert verdict.green, verdict
    assert verdict.tier == "native"
    assert not any("does not serve" in note for note in verdict.notes), verdict.notes


def test_the_pair_to_be_timed_is_green(rig: Rig):
    verdict = verdict_on(rig, silu_pair.HONEST)
    assert verdict.green, verdict
    assert len(verdict.cases) == 2


def test_arithmetic_in_bfloat16_of_a_float32_forward_is_a_downgrade(rig: Rig):
    # the exact tier accepts this kernel: nothing rounds there
    verdict = verdict_on(rig, silu_pair.COARSE_KERNEL + silu_pair.COARSE)
    assert verdict.status is Status.PRECISION_DOWNGRADE, verdict
    assert verdict.grad == "x"
    assert verdict.ratio > 10


def test_elements_that_no_kernel_writes_are_not_finite(rig: Rig):
    # fresh memory holds NaN: what happens to be right in it cannot save a kernel that leaves it alone
    assert verdict_on(rig, silu_pair.UNWRITTEN).status is Status.NOT_FINITE


def test_a_backward_that_wants_the_whole_gpu_is_out_of_memory_and_leaves_the_rest_its_share(rig: Rig):
    # Without a share, what takes everything would also take it from the next child and from whoever else computes.
    verdict = verdict_on(rig, silu_pair.GREEDY)
    assert verdict.status is Status.OUT_OF_MEMORY, verdict
    assert verdict_on(rig, silu_pair.HONEST).green


def test_an_illegal_access_ends_its_own_child_only(rig: Rig):
    verdict = verdict_on(rig, silu_pair.WILD)
    assert verdict.status is Status.CRASHED, verdict
    assert verdict_on(rig, silu_pair.HONEST).green
