"""The sweep before a model is asked: bounded, every step green, and honest about what it did."""

import pytest
from bench_pairs import entry, source

from kernel_agent.bench.modelled import modelled, screen
from kernel_agent.bench.records import Basis, Measurement, ShapeTime
from kernel_agent.bench.tune import Tried, tune
from kernel_agent.bench.variants import Space
from kernel_agent.errors import EnvironmentProblem
from kernel_agent.gate import Verdict
from kernel_agent.pairs.assemble import assemble, candidate_from_pair
from kernel_agent.pairs.spec import Candidate

SMALL_TILES = candidate_from_pair(source("matmul_bias"))


def took(microseconds: float) -> Measurement:
    return Measurement(basis=Basis.MEASURED, device="a clock", shapes=(ShapeTime(label="N=1", median_us=microseconds),))


class Clock:
    """A time made of the text: larger tiles of the first kernel are faster."""

    def __init__(self) -> None:
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> Measurement:
        self.asked.append(candidate)
        tile = Space.of(candidate).tunables[0].value
        return took(1000.0 / tile)


@pytest.fixture
def gate(judge):
    """The real gate at the pair's own sizes."""
    spec = judge.spec("matmul_bias")
    return lambda candidate: judge.check_source("matmul_bias", assemble(spec, candidate))


@pytest.mark.slow
def test_modelled_times_and_the_real_gate_find_larger_tiles(judge, gate):
    # Tiles of 16 at 512 cubed reread everything 32 times: any tuner must leave them.
    spec = judge.spec("matmul_bias").model_copy(update={"sweep": (entry(M=512, N=512, K=512),)})
    told: list[Tried] = []
    found = tune(
        spec,
        SMALL_TILES,
        gate,
        lambda candidate: modelled(spec, candidate, judge.sandbox),
        limit=3,
        on_variant=told.append,
        screen=screen(spec, SMALL_TILES, judge.sandbox),
    )
    assert found.candidate is not None
    assert found.verdict is not None
    assert found.verdict.green
    assert "16 -> " in found.tuned.line
    assert "modelled, not measured" in found.tuned.line
    assert found.tuned.best == found.candidate.digest
    assert 1 <= len(told) <= 3
    assert found.tuned.tried == len(told)


def test_the_sweep_ends_at_its_limit(judge, gate):
    clock = Clock()
    tune(judge.spec("matmul_bias"), SMALL_TILES, gate, clock, limit=2)
    assert len(clock.asked) == 1 + 2, "the start, and two variants"


def test_a_faster_variant_that_is_wrong_is_not_taken(judge):
    # The gate is red for whatever is not the start: the clock alone must not decide.
    spec = judge.spec("matmul_bias")
    broken = source("matmul_bias", ("acc += tl.dot(x, g)", "acc += 2 * tl.dot(x, g)"))
    told: list[Tried] = []
    found = tune(
        spec, SMALL_TILES, lambda _: judge.check_source("matmul_bias", broken), Clock(), limit=3, on_variant=told.append
    )
    assert found.candidate is None
    assert found.tuned.best is None
    assert told[-1].line == "faster but wrong: WRONG_GRADIENT"


def test_where_the_fastest_is_wrong_the_step_before_it_is_proven(judge, gate):
    # Were the fastest taken on the clock alone, or given up altogether, this would end otherwise.
    spec = judge.spec("matmul_bias")
    checked: list[Candidate] = []

    def red_at_first(candidate: Candidate) -> Verdict:
        checked.append(candidate)
        if len(checked) > 1:
            return gate(candidate)
        return judge.check_source(
            "matmul_bias", source("matmul_bias", ("acc += tl.dot(x, g)", "acc += 2 * tl.dot(x, g)"))
        )

    found = tune(spec, SMALL_TILES, red_at_first, Clock(), limit=2)
    assert len(checked) == 2
    assert found.candidate == checked[1]
    assert found.verdict is not None
    assert found.verdict.green


def test_a_variant_that_the_compiler_rules_out_is_not_timed(judge, gate):
    clock = Clock()
    told: list[Tried] = []
    found = tune(
        judge.spec("matmul_bias"),
        SMALL_TILES,
        gate,
        clock,
        limit=5,
        on_variant=told.append,
        screen=lambda _: "spills 96 bytes per thread instead of 0",
    )
    assert found.candidate is None
    assert len(clock.asked) == 1
    assert {tried.microseconds for tried in told} == {None}


def test_a_variant_that_cannot_be_timed_is_left_out(judge, gate):
    clock = Clock()

    def measure(candidate: Candidate) -> Measurement:
        if candidate != SMALL_TILES:
            raise EnvironmentProblem("the GPU is busy")
        return clock(candidate)

    told: list[Tried] = []
    found = tune(judge.spec("matmul_bias"), SMALL_TILES, gate, measure, limit=3, on_variant=told.append)
    assert found.candidate is None
    assert told[0].line == "cannot be timed: the GPU is busy"


def test_too_little_gain_is_not_kept(judge, gate):
    found = tune(judge.spec("matmul_bias"), SMALL_TILES, gate, Clock(), limit=1, min_rel_impr=0.9)
    assert found.candidate is None
    assert "90% is asked for" in found.tuned.line


def test_the_compiler_rules_out_what_needs_too_much_shared_memory(judge):
    spec = judge.spec("matmul_bias").model_copy(update={"sweep": (entry(M=512, N=512, K=512),)})
    why = screen(spec, SMALL_TILES, judge.sandbox)
    staged = ("BM=16, BN=16, BK=16)\n    _linear_dw", "BM=64, BN=64, BK=64, num_stages=24)\n    _linear_dw")
    assert "shared memory" in why(candidate_from_pair(source("matmul_bias", staged)))
    assert why(SMALL_TILES) == ""
