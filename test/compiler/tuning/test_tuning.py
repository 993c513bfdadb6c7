"""What a derived backward chooses is found in its text, searched part by part, and written down per shape class."""

import ast
import math
import time
from collections.abc import Sequence
from types import SimpleNamespace

from kernel_agent.bench.rig import BenchOptions
from kernel_agent.bench.tunable import TunableKind
from kernel_agent.compiler.tuning.by_model import ByModel
from kernel_agent.compiler.tuning.classes import Class, classes
from kernel_agent.compiler.tuning.on_gpu import GRACE_S, OnGpu
from kernel_agent.compiler.tuning.pins import names_before, pinned
from kernel_agent.compiler.tuning.search import Part, _first, parts_of, search
from kernel_agent.compiler.tuning.space import space
from kernel_agent.compiler.tuning.trial import KernelTrial, Trial, Tried
from kernel_agent.compiler.tuning.tune import fixed_tiles
from kernel_agent.pairs.sections import BACKWARD_MARKER, CHECK_MARKER, FORWARD_MARKER
from kernel_agent.pairs.spec import Candidate
from kernel_agent.sandbox import Ending, Job, Report

ROWS = """
@triton.jit
def rows_kernel(X, dX, N, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    for row in tl.range(tl.program_id(0), N, tl.num_programs(0), num_stages=STAGES):
        tl.store(dX + row, tl.load(X + row))


def backward(saved, grad_y):
    (x,) = saved
    M, N = x.shape
    BLOCK_N = triton.next_power_of_2(N)
    num_warps = max(4, min(32, BLOCK_N // 512))
    per_sm = max(1, 16 // num_warps)
    STAGES = 2 if N <= 8192 else 1
    programs = min(M, per_sm * torch.cuda.get_device_properties(x.device).multi_processor_count)
    rows_kernel[(programs,)](x, grad_y, N, BLOCK_N=BLOCK_N, STAGES=STAGES, num_warps=num_warps)
    return grad_y
"""

TWO = """
@triton.jit
def dq_kernel(Q, T, D: tl.constexpr, BLOCK_M: tl.constexpr):
    tl.store(Q, 0.0)


@triton.jit
def dk_kernel(K, T, D: tl.constexpr, BLOCK_M: tl.constexpr):
    tl.store(K, 0.0)


def backward(saved, grad_o):
    q, k, causal = saved
    T, D = q.shape
    if causal:
        BLOCK_M, num_warps = 128, 8
        dq_kernel[(triton.cdiv(T, BLOCK_M),)](q, T, D=D, BLOCK_M=BLOCK_M, num_warps=num_warps)
        return q, k
    BLOCK_M, num_warps = 128, 8
    dk_kernel[(triton.cdiv(T, BLOCK_M),)](k, T, D=D, BLOCK_M=BLOCK_M, num_warps=num_warps)
    return q, k
"""


def test_formulas_of_warps_stages_and_programs_are_tuned_as_a_whole():
    # The numbers in a formula mean something else than what the formula is for: 512 is no number of warps.
    inside = space(Candidate(backward=ROWS))
    assert {(tunable.kind, tunable.value) for tunable in inside.tunables} == {
        (TunableKind.WARPS, 0),
        (TunableKind.STAGES, 0),
        (TunableKind.PROGRAMS, 0),
    }
    place = next(k for k, tunable in enumerate(inside.tunables) if tunable.kind is TunableKind.PROGRAMS)
    text = inside.variant({place: 2}).backward
    ast.parse(text)
    assert "    per_sm = 2\n" in text


def test_kernels_with_products_are_not_tried_with_fewer_warps_than_a_group():
    # sm_90 multiplies by groups of four warps: with two, nothing of that speed is left, and tiles of 256 spill.
    text = TWO.replace("    tl.store(Q, 0.0)\n", "    tl.store(Q, tl.sum(tl.dot(a, b)))\n")
    values = {
        tunable.kernels[0]: tunable.values
        for tunable in space(Candidate(backward=text)).tunables
        if tunable.kind is TunableKind.WARPS
    }
    assert values["dq_kernel"] == (4, 8)
    assert 2 in values["dk_kernel"]


def test_rows_without_products_are_tried_in_one_large_tile_of_many_warps():
    # A softmax reads a row twice; with tiles of 8,192 and 16 warps at most, so many programs run at once that the
    # second time comes from memory.
    values = {tunable.kind: tunable.values for tunable in space(Candidate(backward=TWO)).tunables}
    assert values[TunableKind.BLOCK][-1] == 32768
    assert values[TunableKind.WARPS][-1] == 32


def test_smaller_tiles_come_with_fewer_warps_first():
    inside = space(Candidate(backward=TWO))
    part = next(part for part in parts_of(inside) if part.kernels == {"dk_kernel"})
    nearest = dict(next(iter(_first(inside, part, 1))))
    assert sorted(nearest.values()) == [4, 64], "128 by 8 warps becomes 64 by 4"


def test_a_name_that_two_branches_bind_is_tuned_in_each_for_the_launch_of_its_own():
    # Both branches call their tile BLOCK_M; a change of one must leave the other alone.
    inside = space(Candidate(backward=TWO))
    tiles = [tunable for tunable in inside.tunables if tunable.kind is TunableKind.BLOCK]
    assert [tunable.kernels for tunable in tiles] == [("dk_kernel",), ("dq_kernel",)]
    assert {part.kernels for part in parts_of(inside)} == {frozenset({"dq_kernel"}), frozenset({"dk_kernel"})}


def test_each_part_gets_its_own_best_numbers_from_the_same_variants():
    # Were the whole backward's time taken for both, the two parts would pull each other along.
    sizes = {"a": {"T": 64, "D": 64}}

    def judge(variants: Sequence[Candidate]) -> Tried:
        trials = []
        for variant in variants:
            first, second = (
                int(line.split("= ")[1].split(",")[0])
                for line in variant.backward.split("\n")
                if "128," in line or "M, num_warps =" in line
            )
            seen = (
                KernelTrial("dq_kernel", 10 + abs(math.log2(first / 32)), 0),
                KernelTrial("dk_kernel", 10 + abs(math.log2(second / 256)), 0),
            )
            trials.append(Trial({"a": seen}, {"a": 20.0}))
        return Tried(trials, sizes)

    found = search(space(Candidate(backward=TWO)), judge, seconds=60)
    inside = space(Candidate(backward=TWO))
    best = {next(iter(part.kernels)): dict(part.best(part.labels)) for part in found.parts}
    values = {
        kernel: [v for p, v in some.items() if inside.tunables[p].kind is TunableKind.BLOCK]
        for kernel, some in best.items()
    }
    assert values == {"dq_kernel": [32], "dk_kernel": [256]}


def test_what_spills_more_than_the_start_is_not_chosen():
    def judge(variants: Sequence[Candidate]) -> Tried:
        kernels = ("dq_kernel", "dk_kernel")
        trials = []
        for number, _ in enumerate(variants):
            seen = tuple(KernelTrial(name, 5.0 if number else 10.0, 64 if number else 0) for name in kernels)
            trials.append(Trial({"a": seen}, {"a": 10.0}))
        return Tried(trials)

    found = search(space(Candidate(backward=TWO)), judge, seconds=60, rounds=1)
    assert all(part.best(part.labels) == frozenset() for part in found.parts)


def test_a_variant_without_times_costs_nothing_but_its_reason():
    def judge(variants: Sequence[Candidate]) -> Tried:
        return Tried([Trial({}, {}, "OutOfResources: shared memory\nRequired: 300000")] * len(variants))

    found = search(space(Candidate(backward=TWO)), judge, seconds=60, rounds=2)
    assert found.problems == ("OutOfResources: shared memory",)
    assert all(part.best(part.labels) == frozenset() for part in found.parts)


def part_with(times: dict[int, dict[str, float]]) -> Part:
    """A part of one number, place 0, with its times by value; 0 is the start."""
    part = Part((0,), frozenset({"kernel"}))
    part.tried = {frozenset([(0, value)] if value else []): some for value, some in times.items()}
    return part


def test_a_class_is_split_where_another_number_saves_time():
    part = part_with({0: {"s": 10, "m": 10, "l": 10}, 4: {"s": 5, "m": 5, "l": 20}, 16: {"s": 20, "m": 20, "l": 5}})
    sizes = {"s": {"M": 9, "N": 1024}, "m": {"M": 5, "N": 4096}, "l": {"M": 7, "N": 8192}}
    found = classes(part, sizes, ["N", "M"])
    assert [(one.conditions, dict(one.values)) for one in found] == [(("N <= 4096",), {0: 4}), ((), {0: 16})]


def test_a_class_is_split_by_a_flag_of_the_call():
    # one kernel serves both: without the flag the causal one would have the numbers of the other
    part = part_with({0: {"full": 10, "causal": 10}, 4: {"full": 5, "causal": 20}, 16: {"full": 20, "causal": 5}})
    sizes = {"full": {"N": 1024, "causal": False}, "causal": {"N": 1024, "causal": True}}
    found = classes(part, sizes, ["N", "causal"])
    assert [(one.conditions, dict(one.values)) for one in found] == [(("not causal",), {0: 4}), ((), {0: 16})]


def test_a_branch_that_saves_next_to_nothing_is_not_written():
    part = part_with({0: {"s": 10, "l": 10}, 4: {"s": 5.0, "l": 5.02}, 16: {"s": 5.02, "l": 5.0}})
    assert len(classes(part, {"s": {"N": 1}, "l": {"N": 2}}, ["N"])) == 1


def test_choices_that_differ_stand_in_branches_and_those_that_do_not_stay_one_line():
    inside = space(Candidate(backward=TWO))
    tile, warps = (
        next(k for k, t in enumerate(inside.tunables) if t.kernels == ("dk_kernel",) and t.kind is kind)
        for kind in (TunableKind.BLOCK, TunableKind.WARPS)
    )
    text = pinned(
        inside, [(Class(("D <= 64",), {tile: 64, warps: 4}, ()), Class((), {tile: 32, warps: 4}, ()))]
    ).backward
    ast.parse(text)
    assert (
        "    if D <= 64:\n        BLOCK_M, num_warps = 64, 4\n    else:\n        BLOCK_M, num_warps = 32, 4\n" in text
    )
    assert text.count("BLOCK_M, num_warps = 128, 8") == 1, "the other branch keeps what it had"
    once = pinned(inside, [(Class((), {tile: 64}, ()),)], "The fastest on it.").backward
    assert "    # The fastest on it.\n    BLOCK_M, num_warps = 64, 8\n" in once


def test_choices_below_one_another_share_their_branches():
    inside = space(Candidate(backward=ROWS))
    places = {tunable.kind: place for place, tunable in enumerate(inside.tunables)}
    one, other = ({places[TunableKind.WARPS]: w, places[TunableKind.PROGRAMS]: p} for w, p in ((8, 2), (16, 1)))
    text = pinned(inside, [(Class(("N <= 4096",), one, ()), Class((), other, ()))]).backward
    assert (
        "    if N <= 4096:\n        num_warps = 8\n        per_sm = 2\n"
        "    else:\n        num_warps = 16\n        per_sm = 1\n    STAGES" in text
    )


def test_options_that_stand_at_the_launch_get_a_variable_where_they_differ():
    kernel = "@triton.jit\ndef k(X, B: tl.constexpr):\n    pass\n\n\n"
    text = f"{kernel}def backward(saved, g):\n    N = g.shape[0]\n    k[(1,)](g, B=N)\n"
    inside = space(Candidate(backward=text))
    shown = pinned(inside, [(Class(("N <= 64",), {0: 2}, ()), Class((), {0: 8}, ()))]).backward
    assert "    if N <= 64:\n        num_warps = 2\n    else:\n        num_warps = 8\n" in shown
    assert "k[(1,)](g, B=N, num_warps=num_warps)" in shown


def test_what_constexprs_come_from_is_asked_before_the_extents_of_grids():
    # Both M and N tell the entries apart; a person would sign the number of columns.
    inside = space(Candidate(backward=ROWS))
    names = names_before(inside, range(len(inside.tunables)))
    assert names.index("N") < names.index("M")
    assert "num_warps" not in names, "what is tuned itself says nothing of a call"


AGAIN = ROWS.replace("STAGES: tl.constexpr)", "STAGES: tl.constexpr, RELOAD: tl.constexpr)").replace(
    "        tl.store(dX + row, tl.load(X + row))\n",
    "        x = tl.load(X + row)\n"
    "        if RELOAD:\n"
    '            x = tl.load(X + row, eviction_policy="evict_first")\n'
    "        tl.store(dX + row, x)\n",
)
AGAIN = AGAIN.replace("    programs =", "    RELOAD = BLOCK_N > 8192\n    programs =").replace(
    "STAGES=STAGES, num", "STAGES=STAGES, RELOAD=RELOAD, num"
)


def test_whether_a_row_is_loaded_again_is_tried_both_ways():
    # The formula for it was found on one GPU; registers and caches of another may say otherwise.
    inside = space(Candidate(backward=AGAIN))
    place = next(k for k, tunable in enumerate(inside.tunables) if tunable.kind is TunableKind.SWITCH)
    assert "    RELOAD = True\n" in inside.variant({place: 1}).backward
    assert "    RELOAD = False\n" in inside.variant({place: 0}).backward
    part = parts_of(inside)[0]
    assert {(place, 0), (place, 1)} <= {item for values in _first(inside, part, 24) for item in values}


def test_rows_are_loaded_again_by_their_length_where_classes_differ():
    inside = space(Candidate(backward=AGAIN))
    place = next(k for k, tunable in enumerate(inside.tunables) if tunable.kind is TunableKind.SWITCH)
    found = pinned(inside, [[Class(("N <= 4096",), {place: 0}, ()), Class((), {}, ())]]).backward
    ast.parse(found)
    assert "    if N <= 4096:\n        RELOAD = False\n    else:\n        RELOAD = BLOCK_N > 8192\n" in found


def test_a_branch_of_the_forwards_own_is_no_choice():
    # What a causal kernel masks is no question of speed.
    text = AGAIN.replace('            x = tl.load(X + row, eviction_policy="evict_first")\n', "            x = x * 2\n")
    kinds = [tunable.kind for tunable in space(Candidate(backward=text)).tunables]
    assert TunableKind.SWITCH not in kinds


# --- seconds


def test_a_batch_on_the_gpu_is_ended_when_the_seconds_of_the_search_are_over():
    # Two batches of half the seconds each, with what they take beyond those, were twice what was asked for.
    jobs: list[Job] = []

    def run(job: Job) -> Report:
        jobs.append(job)
        return Report(Ending.TIMED_OUT, "it ran too long")

    options = BenchOptions()
    rig = SimpleNamespace(options=options, flush_bytes=0, sandbox=SimpleNamespace(run=run))
    pair = assemble_text()
    judge = OnGpu(pair, (), rig, 45.0, until=time.monotonic() + 12.0)  # type: ignore[arg-type]
    judge([Candidate(backward=TWO)])
    (job,) = jobs
    assert job.payload["compile_s"] + job.payload["time_s"] <= 12.0
    assert job.limits.wall_s <= 12.0 + GRACE_S


def assemble_text() -> str:
    """A pair with TWO for its backward."""
    forward = "def forward():\n    return 0, ()\n"
    return f"META = dict()\n\n\n{FORWARD_MARKER}\n{forward}\n\n{BACKWARD_MARKER}{TWO}\n\n{CHECK_MARKER}\n"


def test_tiles_of_which_nothing_is_known_in_time_stay_as_they_are():
    # No check is begun after the deadline: with neither a forward nor a sandbox here, one would raise.
    tiles = [
        place for place, one in enumerate(space(Candidate(backward=TWO)).tunables) if one.kind is TunableKind.BLOCK
    ]
    found = fixed_tiles(None, assemble_text(), None, SimpleNamespace(), until=0.0)  # type: ignore[arg-type]
    assert found == frozenset(tiles)


def test_variants_are_not_compiled_after_the_deadline_but_for_the_first():
    # `derive --tune` without a GPU went on compiling a batch however few seconds were left.
    class Counted(ByModel):
        def _trial(self, variant: Candidate) -> Trial:
            return Trial({}, {"a": 1.0})

    judge = Counted(None, (), None, until=0.0)  # type: ignore[arg-type]
    first, second = judge([Candidate(backward=TWO), Candidate(backward=ROWS)]).trials
    assert not first.problem
    assert second.problem
