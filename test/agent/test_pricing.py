"""What a plan costs is counted at the user's sizes, and what cannot be counted is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernel_agent.agent.plan import ExtraSaved, GradientPlan, GradientPrice, Plan, Reduction
from kernel_agent.agent.pricing import Pricer, priced_device, sandboxed_pricer
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


@pytest.fixture(scope="module")
def prices() -> Iterator[Callable[[str], tuple[Pricer, KernelSpec]]]:
    """Spec of an example with a pricer that has counted it already."""
    with Sandbox() as sandbox:
        pricer = sandboxed_pricer(sandbox, "cpu")
        specs: dict[str, KernelSpec] = {}

        def of(name: str) -> tuple[Pricer, KernelSpec]:
            if name not in specs:
                specs[name] = describe(read_file(EXAMPLES / f"{name}.py"), sandbox)
            return pricer, specs[name]

        yield of


def planned(grad: str, reduction: Reduction, *saved: str, techniques: tuple[str, ...] = ()) -> GradientPlan:
    return GradientPlan(grad=grad, owner="somebody", reduction=reduction, saved=saved, techniques=techniques)


def plan(*gradients: GradientPlan, extra: tuple[ExtraSaved, ...] = ()) -> Plan:
    return Plan(pairs=(), anchor=None, gradients=gradients, extra=extra)


@pytest.fixture
def layernorm(prices: Callable[[str], tuple[Pricer, KernelSpec]]) -> Callable[..., dict[str, GradientPrice]]:
    """Prices of layernorm by gradient; `""` is the whole plan."""
    pricer, spec = prices("layernorm")

    def price(*gradients: GradientPlan, extra: tuple[ExtraSaved, ...] = ()) -> dict[str, GradientPrice]:
        return {one.grad: one for one in pricer.price(spec, plan(*gradients, extra=extra))}

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


def test_attention_by_atomics_pays_for_float32_sums_and_for_l2(
    prices: Callable[[str], tuple[Pricer, KernelSpec]],
) -> None:
    # B=4 H=16 T=S=2048 D=128 in bfloat16: each of the 16 row tiles of 128 loads every key.
    pricer, spec = prices("attention")
    whole, price = pricer.price(spec, plan(planned("k", Reduction.ATOMICS, "q", "k", "v", "lse")))
    keys = 4 * 16 * 2048 * 128
    assert price.atomics == 16 * keys
    assert price.planned_bytes == (price.floor_bytes or 0) + 16 * keys
    assert price.microseconds is not None
    assert price.microseconds > 1e6 * price.planned_bytes / 3.35e12, "L2 is busy longer than memory"
    assert "set by tensor cores; the backward's arithmetic is not priced" in whole.line


def test_elements_that_one_program_loads_twice_are_no_terms_of_several(
    prices: Callable[[str], tuple[Pricer, KernelSpec]],
) -> None:
    # Softmax of a long row loads it twice: counted alone, that looks like two programs that share it.
    pricer, spec = prices("softmax")
    said = "x: no sum across programs: each element is read by one program only; each program reads an element 2 times"
    _, unknown = pricer.price(spec, plan(planned("x", Reduction.PLAIN_STORE, "out")))
    _, known = pricer.price(
        spec, plan(planned("x", Reduction.PLAIN_STORE, "out")), ForwardFacts(launches=(), crossing=(said,))
    )
    assert "its owner collects 2 terms per element; instead atomics" in unknown.line
    assert "as one program of the forward loads an element of x." in known.line


def test_tensors_that_share_memory_are_not_counted_and_say_so(
    prices: Callable[[str], tuple[Pricer, KernelSpec]],
) -> None:
    # r and k are halves of one tensor there: loads of the buffer are loads of both.
    pricer, spec = prices("gated_recurrence")
    _, r, k = pricer.price(spec, plan(planned("r", Reduction.ATOMICS), planned("k", Reduction.PARTIALS)))
    assert r.planned_bytes is None
    assert "not priced, `r` shares its memory with another tensor" in r.line
    assert k.planned_bytes is None
    assert "not priced, no kernel loads `k` under its own name" in k.line


def test_a_forward_that_cannot_be_counted_is_told_in_one_line(
    prices: Callable[[str], tuple[Pricer, KernelSpec]],
) -> None:
    def count(spec: KernelSpec) -> None:
        raise KernelAgentError("the forward cannot be counted: line 3")

    _, spec = prices("layernorm")
    pricer = Pricer(count, priced_device("cpu"))  # type: ignore[arg-type]
    (price,) = pricer.price(spec, plan(WEIGHT))
    assert price.line == "The plan cannot be priced: the forward cannot be counted: line 3"
    assert price.planned_bytes is None
