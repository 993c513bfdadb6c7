"""A kernel with many long statements is printed a few times, not once for each of them."""

from __future__ import annotations

import pytest
from emit_kernels import kernel

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.emit.layout import WIDTH
from kernel_agent.compiler.emit.printer import Printer
from kernel_agent.compiler.ssa.code import Code

STATEMENTS = 12


def test_names_for_parts_of_long_statements_are_given_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each part that got a name had all printed anew: a backward of a thousand lines took minutes.
    made, b, (x, out) = kernel("several", "*f32 a_rather_long_name_of_a_tensor, *f32 Out", {"BLOCK": 16})
    cols = b.arange(0, 16, "BLOCK")
    for number in range(STATEMENTS):
        tiles = [b.load(x, b.add(cols, b.const(16 * (4 * number + part)))) for part in range(4)]
        whole = b.mul(b.add(b.unary(Code.EXP, tiles[0]), tiles[1]), b.add(b.unary(Code.SIN, tiles[2]), tiles[3]))
        b.store(out, b.add(cols, b.const(16 * number)), b.mul(whole, b.add(b.unary(Code.COS, tiles[1]), tiles[0])))
    rounds = []
    run = Printer.run

    def counted(self: Printer) -> None:
        rounds.append(self)
        run(self)

    monkeypatch.setattr(Printer, "run", counted)
    text = triton_source(made).text

    assert text.count("tl.store(") == STATEMENTS
    assert max(map(len, text.splitlines())) <= WIDTH
    assert sum(bool(one.long) for one in rounds) >= 1, "nothing here is too long, so that this shows nothing"
    assert len(rounds) < STATEMENTS / 2
