"""Where a value is zero is found in a time that grows with the kernel."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from schedule_plans import from_source, plans_of


@triton.jit
def newton(x_ptr, c_ptr, y_ptr, m, n, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    cols = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    ok = (rows < m) & (cols < n)
    c = tl.load(c_ptr + cols, mask=cols < n, other=0.0)
    z = tl.load(x_ptr + rows * n + cols, mask=ok, other=0.0) + c
    u = z
    for _ in tl.static_range(STEPS):
        e = tl.exp(u)
        u -= (u + e - z) / (1.0 + e)
    tl.store(y_ptr + rows * n + cols, u - c, mask=ok)


@pytest.mark.timeout(60)
def test_values_that_each_step_reads_several_times_are_walked_once() -> None:
    # A step reads the value before it four times: six steps asked for anew each time took longer than anybody waits.
    types = {"x_ptr": "*fp32", "c_ptr": "*fp32", "y_ptr": "*fp32", "m": "i32", "n": "i32"}
    kernel = from_source(newton, types, STEPS=6, BM=4, BN=16)
    assert "rows" in plans_of(kernel, "x_ptr c_ptr", "y_ptr", 2)
