"""Without a GPU, what a compile for sm_90 says of a kernel decides: spills, and whether it fits."""

from pathlib import Path

from kernel_agent.bench.tunable import TunableKind
from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.tuning.by_model import ByModel
from kernel_agent.compiler.tuning.settle import unfit
from kernel_agent.compiler.tuning.space import space
from kernel_agent.compiler.tuning.tune import with_backward
from kernel_agent.oracle import describe
from kernel_agent.pairs.assemble import candidate_from_pair
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

WIDE = '''"""x exp(x), 16,384 elements by one warp: more than its registers hold."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def wide_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    tl.store(Y + at, tl.exp(x) * x, mask=at < N)


@autodiff
def wide(x):
    y = torch.empty_like(x)
    wide_kernel[(triton.cdiv(x.numel(), 16384),)](x, y, x.numel(), BLOCK=16384, num_warps=1)
    return y


SWEEP = [dict(N=40000)]


def make_args(N, device="cuda"):
    return (torch.randn(N, device=device),)
'''


def test_a_tile_that_spills_is_told_from_one_that_more_warps_hold(tmp_path: Path, sandbox: Sandbox):
    path = tmp_path / "wide.py"
    path.write_text(WIDE)
    spec = describe(read_file(path), sandbox)
    (draft, *_), _ = drafts(spec, sandbox, most=1)
    inside = space(candidate_from_pair(draft.pair))
    warps = next(place for place, one in enumerate(inside.tunables) if one.kind is TunableKind.WARPS)
    before, after = ByModel(spec, spec.sweep, sandbox)([inside.candidate, inside.variant({warps: 8})]).trials
    assert "spills" in unfit(before)
    assert unfit(after) == ""
    assert after.totals["N=40000"] > 0


def test_a_pair_keeps_the_space_between_its_sections():
    pair = "x = 1\n\n\n# --- forward ---\na = 1\n\n\n# --- backward ---\nb = 1\n\n\n# --- check ---\nc = 1\n"
    assert with_backward(pair, "b = 2\n") == pair.replace("b = 1", "b = 2")
