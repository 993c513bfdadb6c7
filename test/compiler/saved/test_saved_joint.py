"""Parts of a softmax that a later launch joins: their maxima are free where that launch does not answer to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from saved_checks import Forward, close, empty, kernel_from, ran, seeded, tensor

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.saved.joins import accepted, offered
from kernel_agent.compiler.saved.joint import Joint
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel

F32 = "*fp32"
ROWS, PARTS, EACH, D = 3, 2, 24, 5


@triton.jit
def part_kernel(
    X, V, Sums, Tops, Norms, n, each, D, EXTRA: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    top = float("-inf")
    norm = 0.0
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, n), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * n + at, mask=at < n, other=float("-inf"))
        v = tl.load(V + at[:, None] * D + d[None, :], mask=(at[:, None] < n) & (d[None, :] < D), other=0.0)
        higher = tl.maximum(top, tl.max(x, 0))
        fade = tl.exp(top - higher)
        p = tl.exp(x - higher)
        norm = norm * fade + tl.sum(p, 0)
        acc = acc * fade + tl.sum(p[:, None] * v, 0)
        top = higher
    where = row * tl.num_programs(1) + part
    tl.store(Sums + (where + SHIFTED) * D + d, acc, mask=d < D)
    tl.store(Tops + where, top)
    tl.store(Norms + where, norm + EXTRA)


@triton.jit
def join_kernel(Sums, Tops, Norms, Y, parts, D, KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    tops = tl.load(Tops + row * parts + lane, mask=lane < parts, other=float("-inf"))
    top = tl.max(tops, 0)
    more = 1 if KIND == "another row" else 0
    norms = tl.load(Norms + row * parts + lane + more, mask=lane < parts, other=0.0)
    if KIND == "more lanes":
        norms = tl.load(Norms + row * parts + lane)
    norm = tl.sum(norms * tl.exp(tops - top), 0)
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for part in range(parts):
        own = tl.load(Tops + row * parts + part)
        weight = tl.exp(own - top)
        if KIND == "no weight":
            weight = 1.0
        if KIND == "half":
            weight = tl.exp((own - top) * 0.5)
        width = D + 1 if KIND == "another width" else D
        total += tl.load(Sums + (row * parts + part) * width + d, mask=d < width, other=0.0) * weight
    y = total / norm
    if KIND == "the maximum":
        y += top
    if KIND == "if":
        y += tl.load(Tops + row * parts) if row > 0 else 0.0
    tl.store(Y + row * D + d, y, mask=d < D)


def _parts(extra: float = 0.0, shifted: int = 0) -> Forward:
    types = dict.fromkeys(("X", "V", "Sums", "Tops", "Norms"), F32) | dict.fromkeys(("n", "each", "D"), "i32")
    kernel = kernel_from(part_kernel, types, EXTRA=extra, SHIFTED=shifted, BLOCK=16, BLOCK_D=8)
    n = PARTS * EACH - 3
    given = {
        "X": 3 * seeded(ROWS, n), "V": seeded(n, D, seed=1), "Sums": empty(ROWS * PARTS + shifted, D),
        "Tops": empty(ROWS * PARTS), "Norms": empty(ROWS * PARTS), "n": n, "each": EACH, "D": D,
    }  # fmt: skip
    return ran(kernel, (ROWS, PARTS), given, ["X", "V"], ["Sums", "Tops", "Norms"])


def _join(kind: str = "") -> Kernel:
    types = dict.fromkeys(("Sums", "Tops", "Norms", "Y"), F32) | dict.fromkeys(("parts", "D"), "i32")
    return kernel_from(join_kernel, types, KIND=kind, BLOCK=2, BLOCK_D=8)


def _offered(forward: Forward) -> Joint:
    joint = offered(forward.kernel)
    assert joint is not None
    return joint


def _backward(kernel: Kernel, forward: Forward, given: dict[str, Any]) -> tuple[Kernel, dict[str, torch.Tensor]]:
    """Of a kernel at the cotangents of the results in `given`."""
    adjoint = differentiate(kernel, read=frozenset(forward.read), written=frozenset(forward.written))
    arguments = dict(forward.arguments)
    arguments |= {adjoint.cotangents[name]: given[name] for name in forward.written if name in adjoint.cotangents}
    totals = {name: torch.zeros_like(tensor(arguments[name])) for name in forward.read}
    arguments |= {adjoint.gradients[name]: totals[name] for name in forward.read}
    text = prune(adjoint.kernel)
    evaluate(text, forward.grid, arguments)
    return text, totals


def _cotangents_of_a_join(forward: Forward, joint: Joint) -> dict[str, Any]:
    """Random ones of the results that scale, and the one of the maxima that they leave where nothing answers to it."""
    results = {name: tensor(forward.arguments[name]) for name in forward.written}
    found = {"Sums": seeded(*results["Sums"].shape, seed=5), "Norms": seeded(*results["Norms"].shape, seed=6)}
    rates = {one.name: one.rate for one in joint.scaled}
    sums = (found["Sums"] * results["Sums"]).sum(1) * rates["Sums"]
    found["Tops"] = -(sums + found["Norms"] * results["Norms"] * rates["Norms"])
    return found


def test_parts_that_a_join_takes_are_differentiated_without_their_maximum() -> None:
    # The plain adjoint gives the maxima their cotangent, and searches for where they were: both must end in the same.
    forward = _parts()
    joint = _offered(forward)
    assert (joint.pivot, {one.name: one.rate for one in joint.scaled}) == ("Tops", {"Sums": -1.0, "Norms": -1.0})
    given = _cotangents_of_a_join(forward, joint)
    saved = prepared(forward.kernel, frozenset(forward.written), joint=joint)
    free, gradients = _backward(saved.kernel, forward, given)
    plain, expected = _backward(forward.kernel, forward, given)
    assert any(op.code is Code.TAPE_STORE for op in plain.ops)
    assert not any(op.code is Code.TAPE_STORE for op in free.ops)
    for name in forward.read:
        assert expected[name].abs().max() > 1e-3
        close(gradients[name], expected[name], name)


def test_parts_keep_their_tape_where_nobody_says_what_reads_them() -> None:
    forward = _parts()
    saved = prepared(forward.kernel, frozenset(forward.written))
    text, _ = _backward(saved.kernel, forward, _cotangents_of_a_join(forward, _offered(forward)))
    assert any(op.code is Code.TAPE_STORE for op in text.ops)


def test_a_mass_that_does_not_scale_keeps_the_tape() -> None:
    # norm + 1 is not exp(-D) times what it was: with a joint of the two others, its own cotangent would be lost.
    forward = _parts(extra=1.0)
    joint = _offered(forward)
    assert [one.name for one in joint.scaled] == ["Sums"]
    saved = prepared(forward.kernel, frozenset(forward.written), joint=joint)
    text, _ = _backward(saved.kernel, forward, _cotangents_of_a_join(_parts(), _offered(_parts())))
    assert any(op.code is Code.TAPE_STORE for op in text.ops)


def test_rows_that_belong_to_another_maximum_are_not_offered() -> None:
    # The sums of a part lie in the row of the next one: its maximum is not the one that they scale with.
    assert offered(_parts(shifted=1).kernel) is None


def test_a_join_does_not_answer_to_the_maxima() -> None:
    widths = accepted(_join(), "Tops", {"Sums": -1.0, "Norms": -1.0})
    assert widths is not None
    assert {name: width.text() for name, width in widths.items()} == {"Sums": "D", "Norms": "1"}


@pytest.mark.parametrize("kind", ["no weight", "half", "the maximum", "another row", "more lanes", "if"])
def test_a_reader_that_answers_to_the_maxima_is_not_accepted(kind: str) -> None:
    # Each takes a part at another weight than its maximum gives it, or one that belongs to another maximum.
    assert accepted(_join(kind), "Tops", {"Sums": -1.0, "Norms": -1.0}) is None


def test_a_reader_of_other_rates_is_not_accepted() -> None:
    assert accepted(_join(), "Tops", {"Sums": -2.0, "Norms": -1.0}) is None
    assert accepted(_join(), "Tops", {"Sums": -1.0}) is None


def test_a_reader_tells_the_width_that_it_takes_rows_to_have() -> None:
    # It is for the stub to find that this is not the width that they were stored with.
    widths = accepted(_join("another width"), "Tops", {"Sums": -1.0, "Norms": -1.0})
    assert widths is not None
    assert widths["Sums"].text() == "D + 1"
