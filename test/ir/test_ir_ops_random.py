"""Random numbers bit for bit as Triton makes them: dropout masks of forward and backward, here and on a GPU, agree."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.ir import execute

N = 32


@triton.jit
def uniform(Y, seed, n: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, tl.rand(seed, c))


@triton.jit
def normal(Y, seed, n: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, tl.randn(seed, c))


@triton.jit
def four(Y, seed, n: tl.constexpr):
    c = tl.arange(0, n // 4)
    a, b, d, e = tl.rand4x(seed, c)
    tl.store(Y + 4 * c, a)
    tl.store(Y + 4 * c + 1, b)
    tl.store(Y + 4 * c + 2, d)
    tl.store(Y + 4 * c + 3, e)


@triton.jit
def words(Y, seed, n: tl.constexpr):
    c = tl.arange(0, n // 4)
    a, b, d, e = tl.randint4x(seed, c, 7)
    tl.store(Y + 4 * c, a.to(tl.int32, bitcast=True))
    tl.store(Y + 4 * c + 1, b.to(tl.int32, bitcast=True))
    tl.store(Y + 4 * c + 2, d.to(tl.int32, bitcast=True))
    tl.store(Y + 4 * c + 3, e.to(tl.int32, bitcast=True))


INTERPRETED = (
    "import json, sys, torch, triton, triton.language as tl\n"
    "{kernels}\n"
    "found = {{}}\n"
    "for name in {names}:\n"
    "    for seed in {seeds}:\n"
    "        y = torch.empty({n}, dtype=torch.int32 if name == 'words' else torch.float32)\n"
    "        globals()[name][(1,)](y, seed, {n})\n"
    "        found[name + str(seed)] = y.tolist()\n"
    "print(json.dumps(found))\n"
)
KERNELS = {kernel.__name__: kernel for kernel in (uniform, normal, four, words)}
SEEDS = [0, 5, 2**31 + 11, 2**40 + 3]


@pytest.fixture(scope="module")
def tritons_own(tmp_path_factory):
    """What Triton's interpreter makes of the same kernels, float32 numbers by kernel and seed."""
    script = tmp_path_factory.mktemp("random") / "interpreted.py"
    source = "\n".join(inspect.getsource(kernel.fn) for kernel in KERNELS.values())
    script.write_text(INTERPRETED.format(kernels=source, names=list(KERNELS), seeds=SEEDS, n=N))
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def _ours(kernel, seed):
    def stub(seed):
        y = torch.empty(N, dtype=torch.int32 if kernel is words else torch.float32, device="cuda")
        kernel[(1,)](y, seed, N)
        return y

    return execute(stub, (seed,)).result


@pytest.mark.parametrize("seed", SEEDS)
def test_random_words_are_tritons_own_bit_for_bit(seed, tritons_own):
    assert _ours(words, seed).tolist() == tritons_own["words" + str(seed)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", [uniform, four], ids=["rand", "rand4x"])
def test_uniform_numbers_are_tritons_own_up_to_the_rounding_of_a_float32(kernel, seed, tritons_own):
    # the conversion of a word to a float is rounded there and exact here; a wrong word would be off by far more
    theirs = torch.tensor(tritons_own[kernel.fn.__name__ + str(seed)], dtype=torch.float64)
    torch.testing.assert_close(_ours(kernel, seed), theirs, rtol=2**-22, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_normal_numbers_are_tritons_own_up_to_rounding(seed, tritons_own):
    # the logarithm and the cosine of Box and Muller are float32 there and exact here
    theirs = torch.tensor(tritons_own["normal" + str(seed)], dtype=torch.float64)
    torch.testing.assert_close(_ours(normal, seed), theirs, rtol=2e-5, atol=2e-6)
