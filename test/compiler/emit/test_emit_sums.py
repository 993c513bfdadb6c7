"""Sums in memory, as they are printed: right in the executor, and in the order on a GPU that their barriers are for."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
import triton
from emit_kernels import kernel
from emit_round_trip import execution
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.schedule.alone import summed_in_memory
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.ir import import_module

WIDTH, ROWS = 128, 3
ARGUMENTS = "*f32 X, *f32 dX, i32 n"


def summed_rows() -> Kernel:
    """Each program adds n rows of X to its row of dX, and each once more from its end: to elements of other threads."""
    made, _, (x, dx, n) = kernel("summed_rows", ARGUMENTS, {"BLOCK": WIDTH})
    b = Builder(made, frozenset((dx,)))
    lanes = b.arange(0, WIDTH, "BLOCK")
    own = b.mul(b.program_id(0), b.const(WIDTH, "i32", "BLOCK"))

    def step(index: Value, _: list[Value]) -> list[Value]:
        row = b.load(x, b.add(b.mul(index, b.const(WIDTH, "i32", "BLOCK")), lanes))
        b.store(dx, b.add(own, lanes), row, None, Code.ATOMIC_ADD)
        turned = b.sub(b.const(WIDTH - 1), lanes)
        b.store(dx, b.add(own, turned), row, None, Code.ATOMIC_ADD)
        return []

    b.loop((b.const(0), n, b.const(1)), [], step, index_name="row")
    return summed_in_memory(made, {"dX"})


def test_sums_in_memory_are_right_and_no_program_meets_another(tmp_path: Path) -> None:
    # The sanitizer reports elements that two programs store to, as they would without the programs' own rows.
    made = summed_rows()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    given = {"X": x, "dX": torch.zeros(2, WIDTH), "n": ROWS}
    found = execution(made, triton_source(made), tmp_path, (2,), given, sanitize=True)
    assert not found.findings
    torch.testing.assert_close(found.result[1], (x + x.flip(1)).sum(0).expand(2, -1))


def test_a_barrier_stands_between_what_is_stored_and_what_is_loaded_next(tmp_path: Path) -> None:
    # Three stages ask for loads ahead of their trip, and the turned row is other threads': a sum that is loaded before
    # the barrier behind the last store would miss what they added.
    made = summed_rows()
    source = triton_source(made)
    path = tmp_path / "sums.py"
    path.write_text(source.module_text)
    function = getattr(import_module(path, "emit_sums"), source.name)
    types = {name: {"X": "*fp32", "dX": "*fp32", "BLOCK": "constexpr"}.get(name, "i32") for name in source.parameters}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Triton deprecates in its language
        compiled = triton.compile(
            ASTSource(function, types, {"BLOCK": WIDTH}),
            target=GPUTarget("cuda", 90, 32),
            options={"num_stages": 3, "num_warps": 4},
        )
    steps = re.findall(r"\b(ld\.global|st\.global|bar\.sync|cp\.async)", compiled.asm["ptx"])
    assert "cp.async" not in steps
    stores = [place for place, step in enumerate(steps) if step == "st.global"]
    assert len(stores) == 2
    assert [steps[place + 1 : place + 2] for place in stores] == [["bar.sync"]] * 2
    first, second = stores
    assert "ld.global" in steps[first + 2 : second], "the second sum is loaded behind the first one's barrier"
