"""Random kernels do the same after every pass: what is folded, shared, moved and dropped is nowhere missed.

The kernels are made without the builder, so that its own simplifications are on trial, too.
"""

import pytest
import torch
from random_kernels import GRID, RandomKernel, tensors

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.memory import Evaluation
from kernel_agent.compiler.ssa.order import forwards
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.text import text
from kernel_agent.compiler.ssa.value import Kernel

SEEDS = range(30)
WRITTEN = ("Y", "A", "W")


def run(kernel: Kernel) -> tuple[dict[str, torch.Tensor], Evaluation]:
    arguments = tensors()
    counts = evaluate(kernel, GRID, arguments)
    return {name: arguments[name] for name in WRITTEN}, counts


def copied(kernel: Kernel) -> Kernel:
    return Copier(kernel).copy()


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_and_pruned_kernels_leave_the_same_memory_bit_for_bit(seed: int) -> None:
    kernel = RandomKernel(seed).kernel
    expected, accesses = run(kernel)
    assert all(tensor.isfinite().all() for tensor in expected.values())
    for change in (copied, prune):
        found, counts = run(change(kernel))
        for name in WRITTEN:
            assert torch.equal(found[name], expected[name]), (change.__name__, name)
            assert torch.equal(counts.stored[name], accesses.stored[name]), (change.__name__, name)
            assert torch.equal(counts.added[name], accesses.added[name]), (change.__name__, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_that_are_turned_round_leave_the_same_memory_but_for_rounding(seed: int) -> None:
    kernel = RandomKernel(seed).kernel
    expected, _ = run(kernel)
    found, _ = run(forwards(kernel))
    for name in WRITTEN:
        assert torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_pruned_once_is_pruned(seed: int) -> None:
    once = prune(RandomKernel(seed).kernel)
    assert text(prune(once)) == text(once)


def test_random_kernels_have_every_kind_of_operation() -> None:
    # Else the tests above would prove less than they seem to.
    found = {op.code for seed in SEEDS for op in RandomKernel(seed).kernel.ops}
    wanted = {Code.EXPAND, Code.FOR, Code.WHILE, Code.IF, Code.TAPE_LOAD, Code.REDUCE, Code.SCAN, Code.DOT, Code.JOIN,
              Code.LOAD, Code.LINEAR_SCAN, Code.ATOMIC_ADD, Code.STORE, Code.SELECT, Code.FULL,
              Code.BROADCAST}  # fmt: skip
    assert not wanted - found


def test_copies_are_smaller_and_pruned_kernels_smaller_still() -> None:
    sizes = [
        [sum(1 for _ in k.ops) for k in (raw, copied(raw), prune(raw))]
        for raw in (RandomKernel(seed).kernel for seed in SEEDS)
    ]
    raw, copies, pruned = (sum(column) for column in zip(*sizes, strict=True))
    assert copies < 0.9 * raw
    assert pruned < 0.9 * copies


def sliced(kernel: Kernel) -> Kernel | None:
    """The stores of a kernel's body, of values that are demanded one by one; None where one reads what is written."""
    copier = Copier(kernel, Builder(emptied(kernel)))
    try:
        for op in kernel.body.ops:
            if op.code in (Code.STORE, Code.ATOMIC_ADD):
                mask = None if op.mask is None else copier[op.mask]
                copier.b.store(op.base, copier.whole(op.offset), copier[op.stored], mask, op.code)
    except CannotDerive:
        return None
    return copier.b.kernel


def test_slices_compute_what_the_whole_computed() -> None:
    done = 0
    for seed in SEEDS:
        kernel = RandomKernel(seed, statements=12).kernel
        slices = sliced(kernel)
        if slices is None:
            continue
        done += 1
        writes = [op for op in kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)]
        nested = {op.base.name for op in writes if op not in kernel.body.ops}
        expected, found = run(kernel)[0], run(slices)[0]
        for name in {op.base.name for op in writes} - nested:
            assert torch.equal(found[name], expected[name]), (seed, name)
    assert done > len(SEEDS) / 4
