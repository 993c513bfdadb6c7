"""What is made of the masks of a cotangent is made in one order: a text that is derived twice is one text."""

from __future__ import annotations

from reverse_checks import Forward

from kernel_agent.compiler.reverse.lanes import Lanes
from kernel_agent.compiler.ssa.code import Code

WIDE, MASKS = 8, 8


def test_masks_are_expanded_in_the_order_in_which_they_were_made() -> None:
    # Sets of values are in the order of addresses, which are others in every process: of eight masks one process in
    # forty thousand would have these in order by chance.
    k = Forward(X="*f32", n="i32")
    b, lanes = k.b, k.b.arange(0, WIDE)
    masks = [b.compare("lt", lanes, b.add(k.n, b.const(number, "i32"))) for number in range(MASKS)]
    whole = masks[0]
    for mask in masks[1:]:
        whole = b.logical_and(whole, mask)
    x = b.load(k.X, lanes, whole, b.const(0.0, "f32"))

    support = Lanes(b).support(b.expand(x, 1))

    made = [op for op in k.kernel.ops if op.code is Code.EXPAND and op.operands[0] in masks]
    assert [op.operands[0] for op in made] == masks
    assert {mask for mask, _ in support} == {op.result for op in made}
