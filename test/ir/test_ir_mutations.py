"""Mistakes made in a kernel's IR: each does what its class says, at one place, in every specialisation of it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.ir import ExecOptions, Numerics
from kernel_agent.ir.execution import run_once
from kernel_agent.ir.mistakes import OPERATION_MUTATORS
from kernel_agent.ir.mutations import Mutated, mutations

MUTATORS = {mutator.name: mutator for mutator in OPERATION_MUTATORS}


@triton.jit
def _half_of_the_difference(X, Y, OUT, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n, other=0.0)
    y = tl.load(Y + i, mask=i < n, other=0.0)
    tl.store(OUT + i, 0.5 * (x - y), mask=i < n)


@triton.jit
def _sums(X, OUT, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(OUT, tl.sum(tl.load(X + i, mask=i < n, other=0.0), 0))


def halved(x, y, block=4):
    out = torch.empty_like(x)
    _half_of_the_difference[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


def summed(x, block=4):
    out = torch.zeros(1, dtype=torch.float32)
    _sums[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out


X, Y = torch.arange(1.0, 9.0), torch.tensor([2.0, 7.0, 1.0, 8.0, 2.0, 8.0, 1.0, 8.0])


def mutants(call, args, name):
    execution, _ = run_once(call, args, {}, (), ExecOptions(), safe=False)
    return mutations(execution.launches[0].module, [MUTATORS[name]])


def mistaken(call, args, mutation, options=None):
    options = options or ExecOptions()
    watch = Mutated(mutation, MUTATORS[mutation.mutator])
    return run_once(call, args, {}, (), options, safe=False, runner=watch.runner)[0]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("IR: operands exchanged", [(Y - X) / 2]),
        ("IR: other sign", [(X + Y) / 2]),
        ("IR: other constant", [0.75 * (X - Y)]),
        ("IR: half of what is stored", [(X - Y) / 4]),
        ("IR: doubled operand", [X - Y / 2, X / 2 - Y]),
    ],
)
def test_a_mistake_in_arithmetic_is_the_one_that_is_named(name, wanted):
    found = [mistaken(halved, (X, Y), m).result for m in mutants(halved, (X, Y), name) if "cmpi" not in m.place]
    for value in wanted:
        assert any(torch.equal(given, value.double()) for given in found), (name, found)


def test_without_its_mask_a_load_leaves_its_buffer():
    # The mask is the only thing between the last program and what lies behind six elements.
    for mutation in mutants(halved, (X[:6], Y[:6]), "IR: mask left out"):
        findings = mistaken(halved, (X[:6].clone(), Y[:6].clone()), mutation).findings
        assert {finding.kind.value for finding in findings} == {"OUT_OF_BOUNDS"}, mutation.words


def test_a_plain_store_for_an_atomic_is_a_race_and_keeps_one_share():
    (mutation,) = mutants(summed, (X,), "IR: plain store for an atomic")
    execution = mistaken(summed, (X,), mutation)
    assert "RACE" in {finding.kind.value for finding in execution.findings}
    assert float(execution.result) in (float(X[:4].sum()), float(X[4:].sum()))


def test_what_a_library_function_does_has_mutants_at_the_line_that_calls_it():
    # `tl.sum` is written in Triton's own library: no text of the kernel holds its combination.
    (mutation,) = mutants(summed, (X,), "IR: other combine")
    assert mutation.line == _sums.starting_line_number + 3
    assert float(mistaken(summed, (X,), mutation).result) == float(X[3] + X[7])


def test_a_mutation_is_the_same_in_another_specialisation():
    # A size of 16 gives other IR than one of 5: Triton knows that 16 divides it.
    long_x, long_y = torch.arange(16.0), torch.ones(16)
    mutation = next(m for m in mutants(halved, (X[:5], Y[:5]), "IR: other constant") if "constant" in m.place)
    assert torch.equal(mistaken(halved, (long_x, long_y), mutation).result, 0.75 * (long_x - 1).double())


def test_a_sum_kept_in_bfloat16_rounds_in_faithful_arithmetic_too():
    values = torch.full((4,), 1.0 + 2.0**-9)
    found = mutants(summed, (values,), "IR: summands in bfloat16")
    faithful = ExecOptions(sanitize=False, numerics=Numerics.FAITHFUL)
    honest, _ = run_once(summed, (values,), {}, (), faithful, safe=False)
    assert float(honest.result) == 4.0 + 2.0**-7
    assert float(mistaken(summed, (values,), found[0], faithful).result) == 4.0


def test_every_class_has_a_name_of_its_own_and_a_sentence():
    assert len(MUTATORS) == len(OPERATION_MUTATORS)
    assert all(m.sentence.endswith(".") and m.name.startswith("IR: ") for m in OPERATION_MUTATORS)
