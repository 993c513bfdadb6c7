"""What is printed means what was built: Triton reads it, the executor runs it, torch says what must come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import emit_kernels
import pytest
import torch
from emit_round_trip import formatted, run, seeded

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.ssa.value import Kernel

KERNELS = (emit_kernels.softmax_backward, emit_kernels.matmul, emit_kernels.recurrence, emit_kernels.keys_backward)


def test_a_row_reduction_comes_back_as_the_softmax_backward(tmp_path: Path) -> None:
    y, d_y = seeded(3, 13, dtype=torch.float16).softmax(1), seeded(3, 13, dtype=torch.float16, seed=1)
    given = {"Y": y, "stride": 13, "n": 13, "dY": d_y, "dX": torch.zeros(3, 13)}
    d_x = run(emit_kernels.softmax_backward(), tmp_path, (3,), given)["dX"]
    y64, g64 = y.double(), d_y.double()
    torch.testing.assert_close(d_x, y64 * (g64 - (y64 * g64).sum(1, keepdim=True)))


def test_a_loop_of_products_comes_back_as_a_matmul(tmp_path: Path) -> None:
    a, w = seeded(20, 70, dtype=torch.float16), seeded(70, 40, dtype=torch.float16)
    given = {"A": a, "W": w, "Out": torch.zeros(20, 40), "M": 20, "N": 40, "K": 70}
    out = run(emit_kernels.matmul(), tmp_path, (2, 2), given)["Out"]
    torch.testing.assert_close(out, a.double() @ w.double())


def test_carries_that_change_places_are_not_overwritten_before_they_are_read(tmp_path: Path) -> None:
    x = seeded(6, 16)
    out = run(emit_kernels.recurrence(), tmp_path, (1,), {"x_ptr": x, "out_ptr": torch.zeros(6, 16), "n": 6})["out_ptr"]
    h = g = torch.zeros(16, dtype=torch.float64)
    for i in range(5, -1, -1):
        following = h * x[i].double() + g
        torch.testing.assert_close(out[i], following, msg=f"row {i}")
        h, g = (torch.sigmoid(h) if i > 2 else g), following


@pytest.mark.parametrize("build", KERNELS)
def test_the_text_reads_as_a_person_wrote_it(build: Callable[[], Kernel]) -> None:
    """The whole text, so that what changes in it is seen in a review."""
    expected = (Path(__file__).parent / "golden" / f"{build.__name__}.py").read_text()
    assert triton_source(build()).module_text == expected


def test_the_text_is_what_ruff_format_makes_of_it(tmp_path: Path) -> None:
    for build in KERNELS:
        text = triton_source(build()).module_text
        assert formatted(text, tmp_path) == text, build.__name__


def test_products_of_turned_tiles_come_back_as_the_keys_backward(tmp_path: Path) -> None:
    q, k, d_o, lse, delta = seeded(32, 16), seeded(16, 16), seeded(32, 16, seed=1), seeded(32), seeded(32, seed=1)
    given = {"Q": q, "K": k, "dO": d_o, "Lse": lse, "Delta": delta, "dK": torch.zeros(16, 16), "n": 32, "scale": 0.25}
    d_k = run(emit_kernels.keys_backward(), tmp_path, (1,), given)["dK"]
    q, k, d_o, lse, delta = (value.double() for value in (q, k, d_o, lse, delta))
    p = torch.exp(k @ q.T * 0.25 - lse)
    torch.testing.assert_close(d_k, (p * (k @ d_o.T - delta) * 0.25) @ q)
