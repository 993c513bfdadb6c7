"""Rows that are too long are broken where a formatter breaks them, and say what they said."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from kernel_agent.compiler.emit.layout import WIDTH
from kernel_agent.compiler.stub.breaking import broken
from kernel_agent.compiler.stub.lines import Line

SEEN = (
    "programs = min(triton.cdiv(nodes, BLOCK_R), per_sm * torch.cuda.get_device_properties(x.device)."
    "multi_processor_count)",
    "programs = min(share, max(1, per_sm * torch.cuda.get_device_properties(x.device).multi_processor_count // "
    "(sequences * triton.cdiv(D, BLOCK_D))))",
    "dcarries = (torch.empty_like if carries.numel() == C * chunks * B and BLOCK_CHUNK * columns >= C else "
    "torch.zeros_like)(carries)",
    "num_warps = 32 if FETCH else 4 if row_bytes < 32 * 1024 else 8 if row_bytes < 64 * 1024 else 16 if row_bytes < "
    "128 * 1024 else 8",
    "trips = max(triton.cdiv(int(starts.diff().max()) if starts.is_contiguous() and starts.numel() > 1 else "
    "(int(starts.max()) if starts.numel() else 0) - (int(starts.min()) if starts.numel() else 0), 16), 0)",
)


def formatted(text: str) -> str:
    """What `ruff format` makes of a text."""
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length", str(WIDTH), "--isolated", "-"]
    return subprocess.run(ruff, check=True, capture_output=True, text=True, input=text).stdout


@pytest.mark.parametrize("row", SEEN, ids=[row.partition(" ")[0] for row in SEEN])
def test_a_long_assignment_is_broken_as_a_formatter_would(row: str) -> None:
    rows = broken(f"    {row}")
    assert max(map(len, rows)) <= WIDTH
    text = "\n".join(["def backward():", *rows, ""])
    assert formatted(text) == text
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(f"def backward():\n    {row}\n"))


def test_a_long_item_of_a_call_is_broken_item_by_item() -> None:
    axes = ", ".join(
        f"(_divisor(columns, {size}) * x.stride(1), columns // _divisor(columns, {size}))" for size in (1, 2)
    )
    call = Line("dx = gradient_room(", ("x", "dtype=x.dtype", f"stored=({axes})"), ")")
    rows = call.shown(lambda text: text, 1)
    assert max(map(len, rows)) <= WIDTH
    whole = f"dx = gradient_room(x, dtype=x.dtype, stored=({axes}))"
    assert ast.dump(ast.parse("\n".join(rows).strip())) == ast.dump(ast.parse(whole))


@pytest.mark.parametrize(
    "row", ["x = f(1)", f'raise ValueError("{"strides " * 20}")', f"and {' + '.join(['size'] * 40)}"]
)
def test_short_rows_strings_and_parts_of_conditions_stay_as_they_are(row: str) -> None:
    assert broken(row) == [row]
