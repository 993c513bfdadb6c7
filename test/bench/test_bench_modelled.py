"""Modelled times: the order that a GPU would give, for differences whose effect is known."""

import pytest
from bench_pairs import entry, source

from kernel_agent.bench.modelled import NotModelled, modelled
from kernel_agent.bench.records import Basis, decide
from kernel_agent.pairs.assemble import candidate_from_pair
from kernel_agent.pairs.spec import Candidate, KernelSpec


def wide(judge, name: str, **dims: int) -> KernelSpec:
    """The spec of a pair at one size of a real workload. Its check section stays: only SWEEP is another."""
    spec = judge.spec(name)
    return spec.model_copy(update={"sweep": (entry(**dims),)})


def backward(name: str, *changes: tuple[str, str]) -> Candidate:
    return candidate_from_pair(source(name, *changes))


@pytest.fixture(scope="module")
def rows(judge):
    return wide(judge, "layernorm", M=4096, N=1024)


def test_a_measurement_says_that_it_is_none(judge, rows):
    found = modelled(rows, backward("layernorm"), judge.sandbox)
    assert found.basis is Basis.MODELLED
    assert found.device == "H100 SXM"
    assert [shape.label for shape in found.shapes] == ["M=4096 N=1024"]
    assert "modelled, not measured" in found.facts[0]
    assert found.shapes[0].bound_us is not None
    assert found.shapes[0].median_us > found.shapes[0].bound_us, "nothing is faster than the bound"


def test_the_rows_of_kernels_add_up_to_the_whole(judge, rows):
    found = modelled(rows, backward("layernorm"), judge.sandbox)
    assert sum(kernel.microseconds for kernel in found.kernels) == pytest.approx(found.shapes[0].median_us)
    kernel = found.kernels[0]
    assert kernel.name == "_ln_bwd"
    assert kernel.atomics == 2 * 4096 * 1024
    assert (kernel.registers or 0) > 16
    assert found.kernels[1].name == "torch: zeros, zeros_like"


def test_rereading_a_buffer_costs_time_although_its_bytes_are_the_same(judge, rows):
    # Unique bytes, the only thing a bound knows, are equal.
    again = (
        "c1 = tl.sum(xh * wg, 0) / N",
        "c1 = tl.sum(xh * wg, 0) / N + 0 * tl.sum(tl.load(X + c + (row * N + N) % (N * 4096), mask=m, other=0.0), 0)",
    )
    once, twice = (modelled(rows, backward("layernorm", *changes), judge.sandbox) for changes in ((), (again,)))
    assert once.shapes[0].bound_us == pytest.approx(twice.shapes[0].bound_us)
    traffic = [float(line.split("L2 traffic ")[1].split(" us")[0]) for m in (once, twice) for line in m.facts[1:2]]
    assert traffic[1] > 1.2 * traffic[0]


def test_atomics_on_one_address_cost_more_than_on_many(judge, rows):
    crowded = ("tl.atomic_add(DB + c, g, mask=m)", "tl.atomic_add(DB + c * 0, g, mask=m)")
    spread, one = (modelled(rows, backward("layernorm", *changes), judge.sandbox) for changes in ((), (crowded,)))
    assert one.geomean_us > 1.5 * spread.geomean_us


def test_one_program_that_walks_all_rows_is_slower_than_many(judge, rows):
    serial = (
        (
            "def _ln_bwd(DY, X, W, MEAN, RSTD, DX, DW, DB, N, BLOCK: tl.constexpr):\n    row = tl.program_id(0)",
            "def _ln_bwd(DY, X, W, MEAN, RSTD, DX, DW, DB, N, M, BLOCK: tl.constexpr):\n  for row in range(M):",
        ),
        (
            "_ln_bwd[(M,)](g, x, weight, mean, rstd, dx, dw, db, N, BLOCK",
            "_ln_bwd[(1,)](g, x, weight, mean, rstd, dx, dw, db, N, M, BLOCK",
        ),
    )
    many, single = (modelled(rows, backward("layernorm", *changes), judge.sandbox) for changes in ((), serial))
    assert single.geomean_us > 20 * many.geomean_us
    assert not decide(many, single, 0.02).kept


def test_torch_kernels_between_launches_count(judge, rows):
    copied = ("g = grad_out.contiguous()", "g = grad_out.clone().clone()")
    plain, more = (modelled(rows, backward("layernorm", *changes), judge.sandbox) for changes in ((), (copied,)))
    moved = 2 * 2 * 4096 * 1024 * 4 / 3.35e12 * 1e6
    assert more.geomean_us - plain.geomean_us > moved


def test_a_backward_that_does_not_fit_the_gpu_has_no_time(judge):
    # In the exact executor it is green: only the compiler knows that 24 stages need 300 kB.
    spec = wide(judge, "matmul_bias", M=256, N=256, K=256)
    staged = ("BM=16, BN=16, BK=16)\n    _linear_dw", "BM=64, BN=64, BK=64, num_stages=24)\n    _linear_dw")
    with pytest.raises(NotModelled, match="bytes of shared memory"):
        modelled(spec, backward("matmul_bias", staged), judge.sandbox)


def test_a_backward_that_does_not_compile_has_no_time(judge, rows):
    with pytest.raises(NotModelled, match="no_such_function"):
        modelled(rows, backward("layernorm", ("tl.sum(wg, 0) / N", "tl.no_such_function(wg)")), judge.sandbox)


def test_a_backward_that_fails_has_no_time(judge, rows):
    with pytest.raises(NotModelled, match="fails"):
        modelled(
            rows, backward("layernorm", ("g = grad_out.contiguous()", "g = grad_out.no_such_thing()")), judge.sandbox
        )
