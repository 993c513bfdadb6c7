"""What a forward's launches do with memory, and which gradients sum over programs: told of real files, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.oracle import analyse_spec, describe
from kernel_agent.pairs.forward_facts import AccessMode, DerivativeSource, ForwardFacts
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Limits

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def facts_of(sandbox, tmp_path_factory):
    known: dict[tuple[str, ...], ForwardFacts] = {}

    def analysed(name, *changes):
        key = (name, *(part for change in changes for part in change))
        if key not in known:
            path = ROOT / name
            if changes:
                text = path.read_text()
                for old, new in changes:
                    assert old in text, f"{old!r} is not in {name}"
                    text = text.replace(old, new)
                path = tmp_path_factory.mktemp("changed") / path.name
                path.write_text(text)
            known[key] = analyse_spec(describe(read_file(path), sandbox), sandbox)
        return known[key]

    return analysed


def access(facts, argument, mode, line=None):
    """The one access of an argument in a mode."""
    found = [
        one
        for launch in facts.launches
        for one in launch.accesses
        if one.argument == argument and one.mode is mode and line in (None, one.line)
    ]
    assert len(found) == 1, f"{argument} is accessed {len(found)} times: {found}"
    return found[0]


def test_layernorm_reads_a_row_per_program_and_all_of_the_weight(facts_of):
    facts = facts_of("examples/layernorm.py")
    (launch,) = facts.launches
    assert launch.grid == "(31,): axis 0: 31 programs, one per M"
    row = access(facts, "X (x)", AccessMode.LOAD)
    assert row.axes == "M: one per program of axis 0; N: all of it in a tile of 128 (BLOCK_N); contiguous along N"
    assert row.masked, "N=100 does not fill a tile of 128"
    assert access(facts, "W (weight)", AccessMode.LOAD).axes == "N: all of it in a tile of 128 (BLOCK_N); contiguous"
    assert access(facts, "RSTD (output rstd)", AccessMode.STORE).axes == "M: one per program of axis 0"


def test_the_gradient_of_the_weight_of_layernorm_sums_over_rows_and_that_of_x_does_not(facts_of):
    x, weight, bias = facts_of("examples/layernorm.py").crossing
    assert x == "x: no sum across programs: each element is read by one program only"
    assert weight == "weight: dweight sums over M (axis 0) across programs: all 31 read the same element"
    assert bias.startswith("bias: dbias sums over M (axis 0)")


def test_a_kernel_that_reads_its_weight_by_row_needs_no_sum_for_it(facts_of):
    # The statement is counted from addresses: with a weight per row instead of per column it has to change.
    by_row = (
        ("tl.load(W + cols, mask=mask, other=0.0)", "tl.load(W + row)"),
        ("weight = torch.rand(N, device=device)", "weight = torch.rand(M, device=device)"),
        ("def reference", "def no_reference"),
    )
    weight = facts_of("examples/layernorm.py", *by_row).crossing[1]
    assert weight == "weight: no sum across programs: each element is read by one program only"


def test_the_reductions_of_layernorm_run_over_the_columns_of_x(facts_of):
    (launch,) = facts_of("examples/layernorm.py").launches
    told = [(one.operation, one.axis) for one in launch.reductions]
    assert told == [("sum", "N of X (x), 128 (BLOCK_N) at a time")] * 2


def test_matmul_sums_each_gradient_over_the_dim_its_input_lacks(facts_of):
    facts = facts_of("examples/matmul.py")
    a, b = facts.crossing
    assert a.startswith("a: da sums over N (axis 0) across programs")
    assert b.startswith("b: db sums over M (axis 0) across programs")
    (launch,) = facts.launches
    assert [(one.operation, one.axis) for one in launch.reductions] == [
        ("dot", "K of A (a), B (b), 32 (BLOCK_K) at a time")
    ]
    assert "from 0 to K in steps of BLOCK_K" in launch.loops[0]
    assert launch.loops[0].endswith("sums into b_acc")
    assert "a tile of 32 (BLOCK_K) at a time in a loop" in access(facts, "A (a)", AccessMode.LOAD).axes


def test_causal_attention_reads_keys_up_to_the_queries_of_its_program(facts_of):
    facts = facts_of("examples/attention.py")
    keys = access(facts, "K (k)", AccessMode.LOAD).axes
    assert "S: from 0 up to where the program of axis 0 stands" in keys
    q, k, v = facts.crossing
    assert q.startswith("q: no sum across programs")
    assert k.startswith("k: dk sums over T (axis 0) across programs: 1 to 8 of 16"), "late keys have few readers"
    assert v.startswith("v: dv sums over T (axis 0) across programs")
    (loop,) = facts.launches[0].loops
    assert "carries b_max, b_sum, b_acc from one trip to the next" in loop


def test_keys_shared_by_a_group_of_heads_cross_programs(facts_of):
    facts = facts_of("datasets/kernel_pairs/attention/fa_gqa_loop_heads.py")
    (k,) = [line for line in facts.crossing if line.startswith("k: dk sums")]
    assert "HK*group" in k or "group" in k, f"heads of one group read the same key: {k}"


def test_softmax_reads_its_row_twice(facts_of):
    (x,) = facts_of("examples/softmax.py").crossing
    assert x.startswith("x: no sum across programs")
    assert x.endswith("each program reads an element 2 times (lines 21, 32)")


def test_a_gather_says_which_argument_decides(facts_of):
    facts = facts_of("datasets/kernel_pairs/gather_scatter/embedding_atomic.py")
    rows = access(facts, "W (weight)", AccessMode.LOAD)
    assert rows.axes.endswith("where it goes depends on data: Ids (ids)")
    (weight,) = facts.crossing
    assert "dweight sums over T (axis 0) across programs" in weight
    assert "Ids (ids) decides which programs" in weight
    assert "their gradient is zero" in weight, "some rows of the table are not looked up"


def test_cross_entropy_picks_one_logit_by_its_label(facts_of):
    facts = facts_of("examples/cross_entropy.py")
    picked = [one for one in facts.launches[0].accesses if "depends on data: LABELS (labels)" in one.axes]
    assert [(one.argument, one.mode) for one in picked] == [("LOGITS (logits)", AccessMode.LOAD)]


def test_a_recurrence_carries_its_state_and_shares_inputs_between_column_tiles(facts_of):
    facts = facts_of("examples/gated_recurrence.py")
    (loop,) = facts.launches[0].loops
    assert loop.endswith("from 0 to T, 19 trips here; carries b_state from one trip to the next")
    told = {line.split(":")[0]: line for line in facts.crossing}
    assert "dr sums over V (axis 0)" in told["r"], "every tile of V reads all of r"
    assert "du sums over B, V (axis 0 and 1)" in told["u"]
    assert "no sum across programs" in told["v"]
    assert "no sum across programs" in told["initial_state"]


def test_rows_that_are_walked_flat_are_told_as_one_dim(facts_of):
    facts = facts_of("examples/swiglu.py")
    gate = access(facts, "GATE (gate)", AccessMode.LOAD)
    assert gate.axes == "tokens*hidden: a tile of 1024 (BLOCK) per program of axis 0; contiguous"


def test_partial_sums_between_launches_are_told(facts_of):
    facts = facts_of("datasets/kernel_pairs/linear_attention/linattn_causal_chunk.py")
    (line,) = [line for line in facts.crossing if "made by _running_outer" in line]
    assert "in _chunk_out: " in line


def test_the_derivative_of_the_reference_is_told_with_the_names_of_the_backward(facts_of):
    derivative = facts_of("examples/layernorm.py").derivative
    assert derivative.source is DerivativeSource.REFERENCE
    assert "dx = rstd * (t2 - mean_N(t2) - t1 * mean_N(t2 * t1))" in derivative.lines
    assert "dbias = sum_M(grad_out0)" in derivative.lines


def test_a_surrogate_is_derived_in_place_of_the_reference(facts_of):
    derivative = facts_of("datasets/kernel_pairs/quant/fakequant_per_tensor_ste.py").derivative
    assert derivative.source is DerivativeSource.SURROGATE
    assert derivative.lines[-1] == "dx = where(inside, grad_y, 0)", "straight through, where rounding has slope zero"


def test_a_file_without_a_reference_has_no_derivative_and_says_so(facts_of):
    facts = facts_of("examples/swiglu.py", ("def reference", "def plain"))
    assert facts.derivative is None
    assert any("no `reference`" in note for note in facts.notes)


def test_a_forward_that_cannot_be_followed_is_a_note_and_no_error(sandbox):
    spec = describe(read_file(ROOT / "examples/swiglu.py"), sandbox)
    elsewhere = spec.model_copy(update={"sweep": (ShapeEntry(dims={"rows": 3}),)})
    facts = analyse_spec(elsewhere, sandbox)
    assert facts.launches == ()
    assert facts.notes[0].startswith("the forward could not be followed"), facts.notes


def test_a_child_that_takes_too_long_is_a_note_and_no_error(sandbox):
    spec = describe(read_file(ROOT / "examples/swiglu.py"), sandbox)
    facts = analyse_spec(spec, sandbox, Limits(wall_s=0.05))
    assert facts.notes[-1].startswith("facts are not complete"), facts.notes
