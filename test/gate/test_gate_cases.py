"""Which cases are planned: every required entry, odd sizes that the forward takes, and the same plan every time."""

from __future__ import annotations

import re

import pytest

from kernel_agent.errors import InputError
from kernel_agent.gate import GateOptions, Status
from kernel_agent.gate.cases import looks, make_plan
from kernel_agent.oracle import CotangentKind, Truths, describe
from kernel_agent.oracle.cotangents import OF_ROWS
from kernel_agent.pairs.userfile import read_file


@pytest.fixture
def truths_of(judge, tmp_path):
    """Truths of a pair of this folder with changes anywhere in its text."""

    def write(name, *changes):
        text = judge.source(name)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return Truths(describe(read_file(path), judge.sandbox), judge.sandbox)

    return write


def plan_of(truths, **options):
    return make_plan(truths, GateOptions(**options), accepts_needs=False)


def test_the_cheapest_required_shape_comes_first_and_meets_every_kind_of_cotangent(judge):
    plan = make_plan(judge.truths("two_outputs"), GateOptions(), accepts_needs=True)
    kinds = {case.kind for case in plan.shapes[0].cases if not case.partial}
    assert kinds == set(CotangentKind) - set(OF_ROWS), "a vector has no rows"
    assert any(case.needs == (False, True) for case in plan.shapes[0].cases)


def test_rows_of_a_cotangent_lie_apart_and_are_one_and_the_same_where_there_are_rows(judge):
    kinds = {case.kind for case in plan_of(judge.truths("softmax")).shapes[0].cases}
    assert kinds >= set(OF_ROWS)


@pytest.mark.parametrize("name", ["two_outputs", "softmax"])
def test_a_backward_is_told_that_all_is_needed_at_every_shape(judge, name):
    # Operators always tell it in training; asked without it alone, one that is wrong where it is told so was green.
    for shape in make_plan(judge.truths(name), GateOptions(values=()), accepts_needs=True).shapes:
        told = {(case.kind, all(case.needs)) for case in shape.cases if case.needs is not None and not case.partial}
        assert told == {(CotangentKind.STRIDED, True)}


def test_every_required_entry_meets_both_seeds_and_both_layouts(judge):
    for shape in plan_of(judge.truths("layernorm")).shapes:
        if shape.required:
            seen = {(case.point.seed, case.kind) for case in shape.cases}
            assert seen >= {(s, k) for s in (0, 1) for k in (CotangentKind.RANDOM, CotangentKind.STRIDED)}


def test_odd_sizes_include_primes_and_one(judge):
    odd = [shape.entry.dims for shape in plan_of(judge.truths("layernorm")).shapes if not shape.required]
    assert {"M": 7, "N": 41} in odd, "both dims prime"
    assert any(dims["N"] == 1 for dims in odd)


def test_a_small_budget_still_runs_every_required_entry_once(judge):
    plan = plan_of(judge.truths("layernorm"), max_cases=1)
    assert [len(shape.cases) for shape in plan.shapes] == [1, 1]
    assert any("cases left out" in note for note in plan.notes)


def test_large_required_entries_are_shrunk_and_large_others_left_out_and_both_are_said(truths_of):
    sweep = "SWEEP = (dict(M=2048, N=2048), dict(M=8192, N=8192, required=False), "
    truths = truths_of("layernorm", ("SWEEP = (", sweep))
    there, plan = looks(truths, GateOptions()), plan_of(truths)
    assert any("M=2048 N=2048 to M=512 N=512" in note for note in plan.notes), plan.notes
    assert any("M=8192 N=8192" in note and "left out" in note for note in plan.notes), plan.notes
    assert max(shape.elements for shape in plan.shapes) < 2 * GateOptions().max_elements
    (said,) = there()
    assert said.startswith("at M=2048 N=2048 itself")
    assert "4 of 2048 programs" in said
    assert "agree with the reference on sampled rows" in said
    assert "the candidate was compared at M=512 N=512 only" in said


def test_odd_sizes_that_the_forward_refuses_are_dropped_with_a_note(truths_of):
    refuse = ("    M, N = x.shape\n    y = ", "    M, N = x.shape\n    assert N % 10 == 0\n    y = ")
    plan = plan_of(truths_of("softmax", refuse))
    assert all(int(shape.entry.dims["N"]) % 10 == 0 for shape in plan.shapes)
    assert any("does not take" in note and "AssertionError" in note for note in plan.notes), plan.notes


def test_at_most_three_refused_odd_sizes_are_named(truths_of):
    # A forward that takes one width alone refuses a dozen: the note was longer than the verdict.
    refuse = ("    M, N = x.shape\n    y = ", "    M, N = x.shape\n    assert N in (50, 90)\n    y = ")
    plan = plan_of(truths_of("softmax", refuse))
    (note,) = [note for note in plan.notes if note.startswith("odd sizes")]
    assert note.count("AssertionError") == 3
    assert re.search(r"; and \d+ more$", note)


def test_odd_sizes_at_which_the_forward_itself_leaves_its_buffers_are_dropped(truths_of):
    # A forward without masks works at the user's sizes only. No candidate can be blamed for that.
    unmasked = ('x = tl.load(X + row * N + c, mask=m, other=-float("inf"))', "x = tl.load(X + row * N + c)")
    even = ("SWEEP = (dict(M=4, N=50), dict(M=20, N=90, ", "SWEEP = (dict(M=4, N=64), dict(M=20, N=128, ")
    plan = plan_of(truths_of("softmax", unmasked, even))
    assert all(int(shape.entry.dims["N"]) in (1, 64, 128) for shape in plan.shapes), plan
    assert any("outside" in note for note in plan.notes), plan.notes


_DIVIDED = (
    'x = tl.load(X + row * N + c, mask=m, other=-float("inf"))',
    'x = tl.load(X + row // (N // 50) * (N // 50) * N + row % (N // 50) * N + c, mask=m, other=-float("inf"))',
)
"""A row by quotient and remainder, as `h // (Hq // Hk)` has the head of keys; of fewer columns than fifty by none."""


def test_odd_sizes_at_which_the_forward_divides_by_zero_are_dropped(truths_of):
    # There the forward's own number is whatever a device has for it; a candidate that divides on the host raises there.
    plan = plan_of(truths_of("softmax", _DIVIDED))
    assert all(int(shape.entry.dims["N"]) >= 50 for shape in plan.shapes), plan
    assert any("divides by zero" in note for note in plan.notes), plan.notes


def test_odd_sizes_are_dropped_where_programs_that_do_not_return_early_divide_by_zero(truths_of):
    # Attention over packed sequences returns where a tile has no rows before its loop asks for the head of keys: the
    # rest of such a kernel is a block of its own, as its loops are, and only the first block was looked at.
    early = ("    x = tl.load(X", "    if row * N >= 100000:\n        return\n    x = tl.load(X")
    plan = plan_of(truths_of("softmax", _DIVIDED, early))
    assert all(int(shape.entry.dims["N"]) >= 50 for shape in plan.shapes), plan
    assert any("divides by zero" in note for note in plan.notes), plan.notes


def test_odd_sizes_are_dropped_where_a_loop_divides_by_zero(truths_of):
    # The head of keys is asked for where keys are loaded.
    x, divided = _DIVIDED
    loop = f"x = tl.zeros([BLOCK], tl.float32)\n    for _ in range(tl.minimum(N, 1)):\n        x += {divided[4:]}"
    plan = plan_of(truths_of("softmax", (x, loop)), odd_sizes=12)
    assert all(int(shape.entry.dims["N"]) >= 50 for shape in plan.shapes), plan
    assert any("divides by zero" in note for note in plan.notes), plan.notes


def test_odd_sizes_are_asked_where_all_programs_return_before_they_divide_by_zero(truths_of):
    # A kernel may return so that it does not divide: without a look at where programs came, its sizes were lost.
    guard = (
        "    x = tl.load(X",
        "    if N < 50:\n        tl.store(Y + row * N + c, 1.0 / N, mask=m)\n        return\n    x = tl.load(X",
    )
    plan = plan_of(truths_of("softmax", _DIVIDED, guard), odd_sizes=12)
    assert any(1 < int(shape.entry.dims["N"]) < 50 for shape in plan.shapes), plan


def test_a_required_entry_at_which_the_forward_fails_is_the_users_to_mend(truths_of):
    refuse = ("    M, N = x.shape\n    y = ", "    M, N = x.shape\n    assert N < 60\n    y = ")
    with pytest.raises(InputError, match="required SWEEP entry M=20 N=90"):
        plan_of(truths_of("softmax", refuse))


def test_a_derived_shape_whose_arguments_grow_with_the_square_of_a_size_is_left_out(truths_of):
    # M = 1025 would be a million rows: its forward alone would keep the verdict waiting for minutes.
    squared = truths_of("layernorm", ("torch.randn(M, N", "torch.randn(M * M, N"), ("M=5, N=40", "M=9, N=40"))
    sizes = [shape.entry.dims for shape in plan_of(squared).shapes]
    assert max(dims["M"] for dims in sizes) < 100
    assert any(dims["N"] > 1000 for dims in sizes), "rows may be long"


def test_a_shape_beyond_the_first_tile_is_asked_where_a_surrogate_is_the_truth(truths_of):
    # Without it a backward that left out all programs but the first along a row was green.
    surrogate = "def surrogate(x):\n    return torch.softmax(x, -1)\n\n\ndef reference"
    custom = ("    license=", '    gradient="custom",\n    license=')
    truths = truths_of("softmax", custom, ("def reference", surrogate))
    assert truths.spec.custom_gradient
    assert any(shape.entry.dims["N"] == 1025 for shape in plan_of(truths, odd_sizes=1).shapes)


def test_a_shape_that_is_too_large_is_asked_with_fewer_tiles(truths_of):
    # A row of 1,025 beside 200 others is too much for a case that is asked once. Without a smaller one of its kind no
    # program but the first along a row would be met.
    many = truths_of("layernorm", ("torch.randn(M, N", "torch.randn(M * 200, N"), ("M=5, N=40", "M=1, N=40"))
    sizes = [shape.entry.dims["N"] for shape in plan_of(many).shapes]
    assert 513 in sizes
    assert max(sizes) == 513


def test_a_grid_that_is_too_small_only_where_an_output_has_no_cotangent_is_seen(judge):
    # Two blocks of 64 are enough for the one entry of SWEEP, where every kind of cotangent is asked.
    few = (
        "    grid = (triton.cdiv(x.numel(), 64),)\n",
        "    grid = (triton.cdiv(x.numel(), 64) if grad_s is not None else 2,)\n",
    )
    verdict = judge("two_outputs", few)
    assert verdict.status is Status.NOT_FINITE, verdict.message
    assert "cotangent=last-only" in str(verdict.case)


def test_a_grid_that_is_too_small_only_where_a_gradient_is_not_needed_is_seen(judge):
    # Five rows are all that the cheapest shape has, where every choice of gradients is asked.
    few = "(M if needs is None or needs[0] else min(M, 5),)"
    verdict = judge("layernorm", ("    _ln_bwd[(M,)](", f"    _ln_bwd[{few}]("))
    assert verdict.status is Status.WRONG_GRADIENT, verdict.message
    assert "needs=(False, True, False)" in str(verdict.case)
