"""What a plan costs is counted at the user's sizes, and what cannot be counted is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_agent.agent.counted import CountedForward, count_forward, priced_device
from kernel_agent.agent.plan import ExtraSaved, GradientPlan, GradientPrice, Plan, Reduction
from kernel_agent.agent.pricing import price_plan
from kernel_agent.errors import KernelAgentError
from kernel_agent.oracle import describe
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

M, N = 1151, 8192
"""The required entry of layernorm with most elements, in float32."""
TILE, COLUMN, STATISTIC = 4 * M * N, 4 * N, 4 * M

Priced = Callable[..., dict[str, GradientPrice]]
Counted = Callable[[str], tuple[KernelSpec, CountedForward]]


@pytest.fixture(scope="module")
def counted(sandbox: Sandbox) -> Counted:
    """Spec and counts of an example, or of a file, counted once."""
    known: dict[str, tuple[KernelSpec, CountedForward]] = {}

    def of(name: str) -> tuple[KernelSpec, CountedForward]:
        if name not in known:
            path = Path(name) if name.endswith(".py") else EXAMPLES / f"{name}.py"
            spec = describe(read_file(path), sandbox)
            known[name] = spec, count_forward(spec, sandbox, "")
        return known[name]

    return of


def prices(
    found: tuple[KernelSpec, CountedForward], priced: Plan, facts: ForwardFacts | None = None
) -> tuple[GradientPrice, ...]:
    spec, counts = found
    return price_plan(spec, priced, facts, lambda: counts)


def planned(grad: str, reduction: Reduction, *saved: str, techniques: tuple[str, ...] = ()) -> GradientPlan:
    return GradientPlan(grad=grad, owner="somebody", reduction=reduction, saved=saved, techniques=techniques)


def plan(*gradients: GradientPlan, **allocated: tuple[ExtraSaved, ...]) -> Plan:
    return Plan(pairs=(), anchor=None, gradients=gradients, **allocated)


@pytest.fixture
def layernorm(counted: Counted) -> Priced:
    """Prices of layernorm by gradient; `""` is the whole plan."""

    def price(*gradients: GradientPlan, **allocated: tuple[ExtraSaved, ...]) -> dict[str, GradientPrice]:
        return {one.grad: one for one in prices(counted("layernorm"), plan(*gradients, **allocated))}

    return price


WEIGHT = planned("weight", Reduction.ATOMICS, "x", "mean", "rstd")


def test_the_floor_is_what_is_read_once_and_what_is_written(layernorm: Priced) -> None:
    floor = layernorm(WEIGHT)["weight"].floor_bytes
    assert floor == TILE + TILE + 2 * STATISTIC + COLUMN, "grad_out0, x, mean, rstd, and dweight"


def test_scalars_that_are_saved_cost_nothing(layernorm: Priced) -> None:
    with_eps = planned("weight", Reduction.ATOMICS, "x", "mean", "rstd", "eps")
    assert layernorm(with_eps)["weight"].floor_bytes == layernorm(WEIGHT)["weight"].floor_bytes


def test_atomics_are_one_per_load_of_the_forward(layernorm: Priced) -> None:
    price = layernorm(WEIGHT)["weight"]
    assert price.atomics == M * N
    assert "9.43 M adds to 8.19 k addresses, 1,151 each" in price.line
    assert price.planned_bytes == (price.floor_bytes or 0) + 2 * COLUMN, "the sums are zeroed, and read back"


def test_atomics_are_told_beside_partials_of_a_persistent_grid(layernorm: Priced) -> None:
    # 264 programs x 8192 columns x 4 bytes, written and read again.
    assert (
        "instead partials of 264 programs: 92.8 MB (27.7 us), 23 % above, 8.65 MB of sums"
        in layernorm(WEIGHT)["weight"].line
    )


def test_partials_of_a_persistent_grid_are_far_fewer_than_of_the_forwards_programs(layernorm: Priced) -> None:
    persistent = layernorm(planned("bias", Reduction.PARTIALS, techniques=("persistent-grid",)))["bias"]
    plain = layernorm(planned("bias", Reduction.PARTIALS))["bias"]
    assert persistent.workspace_bytes == 264 * COLUMN
    assert plain.workspace_bytes == M * COLUMN
    assert plain.planned_bytes == (plain.floor_bytes or 0) + 2 * M * COLUMN
    assert "instead partials of 264 programs" in plain.line


@pytest.mark.parametrize("owner", ["a share of the rows, all columns", "walks rows with the stride of the grid"])
def test_an_owner_of_many_rows_stores_few_partials(layernorm: Priced, owner: str) -> None:
    one = planned("weight", Reduction.PARTIALS, "x").model_copy(update={"owner": owner})
    assert layernorm(one)["weight"].workspace_bytes == 264 * COLUMN


def test_what_is_computed_again_is_bounded_by_the_forward(layernorm: Priced) -> None:
    one = WEIGHT.model_copy(update={"recomputed": ("xhat",)})
    assert (
        "computing xhat again takes at most the forward's 0.987 us of arithmetic, each time" in layernorm(one)[""].line
    )


def test_a_gradient_whose_input_is_loaded_once_has_nothing_to_bring_together(layernorm: Priced) -> None:
    price = layernorm(planned("x", Reduction.PLAIN_STORE, "x", "weight", "mean", "rstd"))["x"]
    assert "as one program of the forward loads an element of x" in price.line
    assert "instead" not in price.line
    assert price.planned_bytes == price.floor_bytes


def test_a_plain_store_by_another_owner_says_how_many_terms_it_collects(layernorm: Priced) -> None:
    price = layernorm(planned("weight", Reduction.PLAIN_STORE, "x", "mean", "rstd"))["weight"]
    assert "its owner collects 1,151 terms per element" in price.line
    assert "instead atomics" in price.line


def test_the_whole_plan_reads_shared_tensors_once(layernorm: Priced) -> None:
    gradients = (
        planned("x", Reduction.PLAIN_STORE, "x", "weight", "mean", "rstd"),
        planned("weight", Reduction.PLAIN_STORE, "x", "mean", "rstd"),
        planned("bias", Reduction.PLAIN_STORE),
    )
    whole = layernorm(*gradients)[""]
    assert whole.planned_bytes == 3 * TILE + 3 * COLUMN + 2 * STATISTIC
    assert whole.line.startswith(
        "At the largest required shape on H100 SXM: one pass over grad_out0, mean, rstd, weight"
    )
    assert whole.entry == "M=1151 N=8192", "for the reader; a model that is shown a shape may build it in"
    assert "a pass for each gradient 226 MB" in whole.line
    assert "the forward's bound is 22.5 us" in whole.line


def test_what_is_saved_more_is_priced_against_computing_it_again(layernorm: Priced) -> None:
    extra = ExtraSaved(name="xhat", dtype="float32", shape=("M", "N"))
    prices = layernorm(planned("weight", Reduction.ATOMICS, "xhat"), extra=(extra,))
    assert prices["weight"].floor_bytes == 2 * TILE + COLUMN
    assert "saving xhat moves 75.4 MB (22.5 us)" in prices[""].line
    assert "computing it again takes at most the forward's 0.987 us of arithmetic" in prices[""].line


def test_what_passes_from_launch_to_launch_is_written_and_read_once(layernorm: Priced) -> None:
    delta = ExtraSaved(name="delta", dtype="float32", shape=("M", 2))
    without, whole = layernorm(WEIGHT)[""], layernorm(WEIGHT, scratch=(delta,))[""]
    assert (whole.planned_bytes or 0) - (without.planned_bytes or 0) == 2 * 2 * STATISTIC
    assert "delta between launches moves 18.4 kB" in whole.line
    assert whole.floor_bytes == without.floor_bytes, "another schedule may need none"


def test_attention_by_atomics_pays_for_float32_sums_and_for_l2(counted: Counted) -> None:
    # B=4 H=16 T=S=2048 D=128 in bfloat16: each of the 16 row tiles of 128 loads every key.
    whole, price = prices(counted("attention"), plan(planned("k", Reduction.ATOMICS, "q", "k", "v", "lse")))
    keys = 4 * 16 * 2048 * 128
    assert price.atomics == 16 * keys
    assert price.planned_bytes == (price.floor_bytes or 0) + 16 * keys
    assert price.microseconds is not None
    assert price.microseconds > 1e6 * price.planned_bytes / 3.35e12, "L2 is busy longer than memory"
    assert "set by tensor cores; the backward's arithmetic is not priced" in whole.line


def test_elements_that_one_program_loads_twice_are_no_terms_of_several(counted: Counted) -> None:
    # Softmax of a long row loads it twice: counted alone, that looks like two programs that share it.
    said = "x: no sum across programs: each element is read by one program only; each program reads an element 2 times"
    stored = plan(planned("x", Reduction.PLAIN_STORE, "out"))
    _, unknown = prices(counted("softmax"), stored)
    _, known = prices(counted("softmax"), stored, ForwardFacts(launches=(), crossing=(said,)))
    assert "its owner collects 2 terms per element; instead atomics" in unknown.line
    assert "as one program of the forward loads an element of x." in known.line


def test_tensors_that_share_memory_are_counted_apart(counted: Counted) -> None:
    # r and k are halves of one tensor there: loads of that memory are loads of both.
    gradients = (planned("r", Reduction.ATOMICS), planned("k", Reduction.PARTIALS))
    _, r, k = prices(counted("gated_recurrence"), plan(*gradients))
    elements = 8 * 32 * 1024 * 64
    assert r.atomics == 2 * elements, "two slabs of V load each of them"
    assert k.workspace_bytes == 2 * elements * 4


COPYING = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def scale_kernel(X, W, Y, M, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N)
    tl.store(Y + row * N + cols, x * tl.load(W + cols, mask=cols < N), mask=cols < N)


@autodiff(inputs_require_grad=("x", "w"))
def scale(x, w):
    x, w = x.contiguous(), w[::2].contiguous()
    y = torch.empty_like(x)
    scale_kernel[(x.shape[0],)](x, w, y, *x.shape, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


SWEEP = [dict(M=64, N=32)]


def make_args(M, N):
    return torch.randn(N, M, device="cuda").t(), torch.randn(2 * N, device="cuda")
"""


def test_loads_of_a_whole_copy_are_loads_of_its_source(counted: Counted, tmp_path: Path) -> None:
    path = tmp_path / "copying.py"
    path.write_text(COPYING)
    _, x, w = prices(counted(str(path)), plan(planned("x", Reduction.ATOMICS), planned("w", Reduction.ATOMICS)))
    assert x.atomics == 64 * 32, "a transposed x is copied, and every element of the copy is loaded once"
    assert "dw: " in w.line
    assert "not priced, no kernel loads `w`, or only what torch made of it" in w.line, "half of w is copied"


def test_a_forward_that_cannot_be_counted_is_told_in_one_line(counted: Counted) -> None:
    def count() -> CountedForward:
        raise KernelAgentError("the forward cannot be counted: line 3")

    spec, _ = counted("layernorm")
    (price,) = price_plan(spec, plan(WEIGHT), None, count)
    assert price.line == "The plan cannot be priced: the forward cannot be counted: line 3"
    assert price.planned_bytes is None


def test_a_gpu_that_the_table_does_not_know_is_priced_as_the_default() -> None:
    assert priced_device("NVIDIA Something New").name == "H100 SXM"


def test_counts_come_back_from_the_run_folder_as_they_were(counted: Counted) -> None:
    _, counts = counted("layernorm")
    assert CountedForward.model_validate_json(counts.model_dump_json()) == counts
