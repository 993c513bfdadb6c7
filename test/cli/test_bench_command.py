"""`kernel-agent bench` where there is no GPU: an honest end, or modelled times that say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernel_agent.cli.bench import pair_in
from kernel_agent.cli.main import run
from kernel_agent.errors import InputError
from kernel_agent.oracle import describe
from kernel_agent.pairs.assemble import assemble, handwritten
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

PAIR = Path(__file__).resolve().parents[1] / "gate" / "pairs" / "softmax.py"

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so times are measured")

OWN = '''"""Twice x."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff

BLOCK = 64


@triton.jit
def _twice(X, Y, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, 2 * tl.load(X + c, mask=c < n), mask=c < n)


@triton.jit
def _twice_bwd(DY, DX, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(DX + c, 2 * tl.load(DY + c, mask=c < n), mask=c < n)


@autodiff
def twice(x):
    y = torch.empty_like(x)
    _twice[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def _launch(g):
    dx = torch.empty_like(g)
    _twice_bwd[(triton.cdiv(g.numel(), BLOCK),)](g, dx, g.numel(), BLOCK=BLOCK)
    return dx


def backward(saved, grad_y):
    return _launch(grad_y.contiguous())


SWEEP = [dict(n=100)]


def make_args(n, device="cuda"):
    return (torch.randn(n, device=device),)
'''


@without_gpu
def test_without_a_gpu_it_ends_with_3_and_says_what_to_do(capsys: pytest.CaptureFixture[str]):
    assert run(["bench", str(PAIR)]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "no CUDA device" in said.err
    assert "--modelled" in said.err


def test_modelled_times_stand_beside_a_green_verdict_and_are_called_modelled(capsys: pytest.CaptureFixture[str]):
    assert run(["bench", str(PAIR), "--modelled", "H200"]) == 0
    said = capsys.readouterr().out
    assert "GREEN" in said
    assert "modelled, not measured" in said
    assert "H200" in said
    assert '--modelled "H200"' in said, "the command that repeats it"


def test_a_wrong_backward_gets_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = PAIR.read_text()
    assert source.count("y * (g - tl.sum") == 1
    path = tmp_path / "softmax.py"
    path.write_text(source.replace("y * (g - tl.sum", "2 * y * (g - tl.sum"))
    assert run(["bench", str(path), "--modelled", "H200", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["verdicts"][0]["status"] == "WRONG_GRADIENT"
    assert record["measurement"] is None


def test_an_unknown_device_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str]):
    assert run(["bench", str(PAIR), "--modelled", "H1000"]) == 2
    assert "not in the table of devices" in capsys.readouterr().err


def test_a_hand_written_backward_is_judged_as_a_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "twice.py"
    path.write_text(OWN)
    assert run(["bench", str(path), "--modelled", "H200", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdicts"][0]["status"] == "GREEN"
    assert [kernel["name"] for kernel in record["measurement"]["kernels"]][:1] == ["_twice_bwd"]


def test_a_hand_written_backward_brings_its_own_kernels_and_nothing_of_the_forward(tmp_path: Path, sandbox: Sandbox):
    path = tmp_path / "twice.py"
    path.write_text(OWN)
    spec = describe(read_file(path), sandbox)
    candidate = handwritten(spec)
    for name in ("def _twice_bwd", "def _launch", "def backward"):
        assert candidate.backward.count(name) == 1
    assert "def _twice(" not in candidate.backward
    assert assemble(spec, candidate).count("BLOCK = 64") == 1


def test_a_file_without_a_backward_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "twice.py"
    path.write_text(OWN.replace("def backward(", "def other("))
    assert run(["bench", str(path), "--modelled", "H200"]) == 2
    assert "no hand-written `backward`" in capsys.readouterr().err


def test_a_delivered_folder_stands_for_the_operator_in_it(tmp_path: Path):
    operator = tmp_path / "softmax_backward.py"
    operator.write_text("")
    (tmp_path / "bench_softmax.py").write_text("")
    assert pair_in(tmp_path) == operator
    operator.unlink()
    with pytest.raises(InputError, match="0 delivered backwards"):
        pair_in(tmp_path)
