"""Which function's autograd a backward is compared with."""

from __future__ import annotations

from pathlib import Path

import torch

from kernel_agent.bench.baseline_child import _autograd
from kernel_agent.bench.realdevice import load_stub
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

STRAIGHT_THROUGH = Path("datasets/kernel_pairs/quant/fakequant_per_tensor_ste.py")


def test_a_declared_gradient_is_what_the_baseline_computes(sandbox: Sandbox, tmp_path: Path):
    # `reference` rounds: its own gradient is zero almost everywhere, or not connected at all, and cheap to compute.
    stub = load_stub(describe(read_file(STRAIGHT_THROUGH), sandbox), tmp_path)
    arguments = stub.module.make_args(**stub.module.SWEEP[0])
    cotangent = torch.ones_like(stub.module.reference(*arguments))
    gradients = _autograd("eager", stub, arguments, {}, [cotangent])()
    assert all(gradient is not None for gradient in gradients)
    dx = gradients[0]
    assert dx.ne(0).float().mean() > 0.5, "the straight-through gradient passes where nothing is clipped"
