"""What can be tuned is found where people write it, and a variant is the same text with other numbers."""

import ast
from dataclasses import replace

from bench_pairs import source

from kernel_agent.bench.tunable import TunableKind
from kernel_agent.bench.variants import Space
from kernel_agent.pairs.assemble import candidate_from_pair
from kernel_agent.pairs.spec import Candidate

KERNEL = """
@triton.jit
def _kernel(X, N, BLOCK: tl.constexpr, ROWS: tl.constexpr = 1):
    tl.store(X + tl.arange(0, BLOCK), 0.0)
"""


def space(text: str) -> Space:
    return Space.of(Candidate(backward=KERNEL + text))


def found(text: str) -> dict[str, int]:
    return {tunable.name: tunable.value for tunable in space(text).tunables if not tunable.insert}


def variant(text: str, name: str, value: int) -> str:
    """The text behind the kernel, with one other value."""
    inside = space(text)
    place = next(k for k, tunable in enumerate(inside.tunables) if tunable.name == name)
    changed = inside.variant({place: value}).backward
    ast.parse(changed)
    return changed.removeprefix(KERNEL)


def test_a_literal_at_a_launch():
    text = "def backward(saved, g):\n    _kernel[(7,)](g, 5, BLOCK=64, num_warps=2)\n"
    assert found(text) == {"BLOCK of _kernel": 64, "num_warps of _kernel": 2}
    assert "BLOCK=128, num_warps=2" in variant(text, "BLOCK of _kernel", 128)


def test_a_positional_constexpr():
    text = "def backward(saved, g):\n    _kernel[(7,)](g, 64, 32)\n"
    assert found(text) == {"BLOCK of _kernel": 32}, "N is no constexpr, whatever its value"
    assert "(g, 64, 16)" in variant(text, "BLOCK of _kernel", 16)


def test_a_name_that_is_assigned_once_here_or_in_the_module():
    text = "WIDE = 256\n\ndef backward(saved, g):\n    rows = 4\n    _kernel[(7,)](g, 5, BLOCK=WIDE, ROWS=rows)\n"
    assert found(text) == {"WIDE": 256, "rows": 4}
    assert variant(text, "rows", 8).count("8") == 1


def test_a_name_that_is_assigned_twice_stays():
    text = "def backward(saved, g):\n    B = 64\n    B = 32\n    _kernel[(7,)](g, 5, BLOCK=B)\n"
    assert found(text) == {}


def test_both_branches_of_a_choice_between_pairs():
    text = "def backward(saved, g):\n    a, b = (128, 64) if g else (32, 16)\n    _kernel[(7,)](g, 5, BLOCK=b)\n"
    assert [tunable.value for tunable in space(text).tunables if not tunable.insert] == [64, 16]


def test_limits_of_a_size_that_is_rounded_up_but_not_its_least_value():
    text = "def backward(saved, g):\n    _kernel[(7,)](g, 5, BLOCK=max(16, min(1024, triton.next_power_of_2(9))))\n"
    assert found(text) == {"BLOCK": 1024}


def test_the_same_number_in_the_grid_changes_with_it():
    # One without the other would leave elements out, or compute them twice.
    text = "def backward(saved, g):\n    _kernel[(triton.cdiv(9, 64),)](g, 5, BLOCK=64)\n"
    assert variant(text, "BLOCK of _kernel", 32) == text.replace("64", "32")


def test_entries_of_a_dict_of_arguments():
    text = "def backward(saved, g):\n    sizes = {'BLOCK': 64}\n    _kernel[(7,)](g, 5, **sizes)\n"
    assert found(text) == {"BLOCK": 64} or found(text) == {"BLOCK of _kernel": 64}


def test_warps_are_inserted_where_nothing_is_said():
    text = "def backward(saved, g):\n    _kernel[(7,)](\n        g,\n        5,\n        BLOCK=64,\n    )\n"
    assert "BLOCK=64, num_warps=8,\n" in variant(text, "num_warps of _kernel", 8)


def test_stages_are_inserted_only_where_a_loop_feeds_a_dot():
    dot = KERNEL + "    for k in range(N):\n        tl.dot(X, X)\n"
    call = "\ndef backward(saved, g):\n    _kernel[(7,)](g, 5, BLOCK=64)\n"
    with_dot, without = Space.of(Candidate(backward=dot + call)), Space.of(Candidate(backward=KERNEL + call))
    assert [t.kind for t in with_dot.tunables if t.insert] == [TunableKind.WARPS, TunableKind.STAGES]
    assert [t.kind for t in without.tunables if t.insert] == [TunableKind.WARPS]


def test_one_of_several_configurations_is_kept():
    tuned = KERNEL.replace(
        "@triton.jit",
        "@triton.autotune([triton.Config({'BLOCK': 64}), triton.Config({'BLOCK': 128}, num_warps=8)], key=['N'])\n"
        "@triton.jit",
    )
    inside = Space.of(Candidate(backward=tuned + "\ndef backward(saved, g):\n    _kernel[(7,)](g, 5)\n"))
    (tunable,) = inside.tunables
    assert tunable.kind is TunableKind.CONFIG
    assert "autotune([triton.Config({'BLOCK': 128}, num_warps=8)], key" in inside.variant({0: 1}).backward


def test_numbers_of_a_single_configuration():
    tuned = KERNEL.replace(
        "@triton.jit", "@triton.autotune([triton.Config({'BLOCK': 64}, num_warps=8)], key=['N'])\n@triton.jit"
    )
    inside = Space.of(Candidate(backward=tuned + "\ndef backward(saved, g):\n    _kernel[(7,)](g, 5)\n"))
    assert [(tunable.name, tunable.value) for tunable in inside.tunables] == [
        ("BLOCK of _kernel", 64),
        ("num_warps of _kernel", 8),
    ]


def test_several_changes_at_once_and_letters_of_more_than_one_byte():
    text = "def backward(saved, g):\n    'größer'; B, C = 64, 16\n    _kernel[(7,)](g, 5, BLOCK=B, ROWS=C)\n"
    inside = space(text)
    places = {tunable.name: place for place, tunable in enumerate(inside.tunables)}
    changed = inside.variant({places["B"]: 1024, places["C"]: 4, places["num_warps of _kernel"]: 2}).backward
    assert "'größer'; B, C = 1024, 4\n" in changed
    assert "ROWS=C, num_warps=2)" in changed


def test_what_is_no_python_has_nothing_to_tune():
    assert Space.of(Candidate(backward="def backward(:")).tunables == ()


def test_a_kernel_launched_from_a_real_pair_is_found():
    inside = Space.of(candidate_from_pair(source("matmul_bias")))
    assert [tunable.name for tunable in inside.tunables][:2] == ["BM, BN, BK of _linear_dx", "num_warps of _linear_dx"]


def test_numbers_behind_a_flag_are_none():
    # `(True,) * 2` is how often, not how large: changing it changes nothing, and noise would call it faster.
    text = "def backward(saved, g, needs=None):\n    needs = needs or (True,) * 2\n"
    text += "    _kernel[(7,)](g, 5, BLOCK=64, ROWS=bool(needs[0]), num_warps=2)\n"
    assert found(text) == {"BLOCK of _kernel": 64, "num_warps of _kernel": 2}


WALK = """
@triton.jit
def _walk(X, M, N, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), M, N):
        tl.store(X + row, tl.load(X + row))
    for block in tl.range(0, N, BLOCK, num_stages=3):
        tl.store(X + block, tl.load(X + block))
"""


def loops_of(backward: str) -> Space:
    inside = Space.of(Candidate(backward=backward), inside_kernels=True)
    assert not [one for one in Space.of(Candidate(backward=backward)).tunables if one.kind is TunableKind.PIPELINE]
    return replace(inside, tunables=tuple(one for one in inside.tunables if one.kind is TunableKind.PIPELINE))


def test_a_loop_that_loads_may_be_pipelined():
    # Without it the sweep cannot reach what a row kernel gains most from.
    inside = loops_of(WALK)
    assert [tunable.value for tunable in inside.tunables] == [1, 3]
    changed = inside.variant({0: 3, 1: 1}).backward
    assert "for row in tl.range(tl.program_id(0), M, N, num_stages=3):" in changed
    assert "for block in range(0, N, BLOCK):" in changed
    assert inside.said({0: 3}) == "stages of the loop over `row` of _walk 1 -> 3"


def test_a_loop_with_a_dot_is_pipelined_by_its_launch():
    # Two places for one number would be timed twice.
    assert loops_of(WALK.replace("tl.load(X + block)", "tl.dot(tl.load(X + block), X)")).tunables[1:] == ()


def test_other_words_of_a_loop_stay():
    flat = WALK.replace("num_stages=3", "flatten=True")
    changed = loops_of(flat).variant({1: 2}).backward
    assert "tl.range(0, N, BLOCK, flatten=True, num_stages=2)" in changed
