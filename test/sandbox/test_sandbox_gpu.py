"""The walls leave a GPU usable: CUDA starts after the fork, and Triton compiles and launches behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sandbox_jobs import Run

from kernel_agent.sandbox import Limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA device on this machine"),
]


def test_a_triton_kernel_compiles_and_runs_in_the_sandbox(run: Run) -> None:
    report = run("launch_a_kernel", Limits(wall_s=120))
    assert report.finished, report
    assert torch.equal(report.messages[0].tensors["y"], 2 * torch.arange(1000.0))
    assert report.messages[0].record["cached"] > 0, "the kernel cache lies in scratch"


def test_a_second_child_starts_cuda_afresh(run: Run) -> None:
    # Catches a server that initialised CUDA: its second fork could not use the device any more.
    assert run("launch_a_kernel", Limits(wall_s=120)).finished
    assert run("launch_a_kernel", Limits(wall_s=120)).finished
