"""Variants are compiled by processes without a GPU, into a cache where the process that times them finds them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_agent.compiler.tuning import child
from kernel_agent.ir import import_module, standin
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.sandbox import Call

PAIR = """
import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < N) * 2.0, mask=at < N)


def forward(x):
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y, (x,)


def backward(saved, grad_y):
    (x,) = saved
    N = x.numel()
    dx = torch.empty_like(x)
    scale_kernel[(triton.cdiv(N, 128),)](grad_y, dx, N, BLOCK=128)
    return dx


def make_args(N, device="cuda"):
    return (torch.randn(N, device=device),)
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    payload = {"host_bytes": 8 << 30, "workers": 2, "compile_s": 60.0}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Call(payload, {}, tmp_path, "variants", ours)


def test_workers_compile_what_the_backward_launches_and_tell_what_they_cannot(call: Call):
    # In the sandbox, a process that a child starts cannot use the GPU: workers that ask for one compile nothing.
    texts = (PAIR, PAIR.replace("BLOCK=128", "BLOCK=100"))
    paths = [call.scratch / f"variant_{number}.py" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    arguments = [
        build_arguments(import_module(paths[0], "makes_args"), ShapeEntry(dims={"N": 1000}), device="cpu", seed=0)
    ]
    child._compile(call, paths, arguments)
    assert child._told(call.scratch, 0, 0) == {}
    assert "power of 2" in child._told(call.scratch, 1, 0)["problem"]
    assert len(cubins(call)) == 2, "of the forward, which is run once before variants are timed, and of the backward"
    with standin():
        assert child.compiled(child._imported(paths[0], 0), arguments[0]) == ""
    assert len(cubins(call)) == 2, "found in the cache"


def test_an_autotuned_forward_is_run_with_its_first_config_alone(call: Call):
    # Its benchmark took longer than the variants that it is run for: of each entry, all configs compiled and timed.
    configs = "[triton.Config(dict(BLOCK=64)), triton.Config(dict(BLOCK=256))]"
    text = PAIR.replace("@triton.jit", f'@triton.autotune(configs={configs}, key=["N"])\n@triton.jit')
    path = call.scratch / "tuned.py"
    path.write_text(text.replace(", BLOCK=64)", ")").replace(", BLOCK=128)", ")"))
    module = import_module(path, "tuned")
    given = build_arguments(module, ShapeEntry(dims={"N": 1000}), device="cpu", seed=0)
    seen = []
    with standin(), child._launching(lambda _: seen.append(module.scale_kernel.configs[0]), {}):
        child._Calls(module, given, on_gpu=False)
    assert [config.kwargs for config in seen] == [{"BLOCK": 64}]
    assert len(module.scale_kernel.configs) == 2, "whoever runs it later tunes it"


def cubins(call: Call) -> list[Path]:
    """What was compiled."""
    return list((call.scratch / "triton").rglob("scale_kernel.cubin"))


def test_sizes_are_whole_numbers_and_flags_of_a_backward_and_how_wide_its_elements_are():
    import torch

    found = child.sizes_in({"N": 7, "flag": True, "x": torch.zeros(3, dtype=torch.bfloat16), "eps": 1e-5})
    assert found == {"N": 7, "flag": True, "x.element_size()": 2}
