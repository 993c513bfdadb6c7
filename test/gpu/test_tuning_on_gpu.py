"""A derived backward is tuned on a real device: variants are compiled by processes and timed, the chosen is green."""

from __future__ import annotations

from pathlib import Path

import pytest
import silu_pair
import torch

from kernel_agent.bench.native import check_native
from kernel_agent.bench.rig import Rig
from kernel_agent.compiler.tuning.on_gpu import OnGpu
from kernel_agent.compiler.tuning.space import space
from kernel_agent.compiler.tuning.tune import at_entries, tune
from kernel_agent.pairs.assemble import candidate_from_pair
from kernel_agent.sandbox import Sandbox

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="times variants of real kernels: needs a CUDA device"),
]


@pytest.fixture(scope="module")
def rig(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(silu_pair.spec_of(tmp_path_factory.mktemp("silu"), sandbox), sandbox)


def test_each_variant_has_the_times_of_its_kernels_or_a_reason(rig: Rig):
    # A variant whose launch names no parameter of the kernel fails in the process that compiles it, and alone.
    inside = space(candidate_from_pair(silu_pair.pair()))
    warps = next(place for place, tunable in enumerate(inside.tunables) if tunable.name.startswith("num_warps"))
    variants = [inside.candidate, inside.variant({warps: 8})]
    broken = inside.candidate.model_copy(update={"backward": inside.candidate.backward.replace("BLOCK=", "BLOCKS=")})
    judge = OnGpu(silu_pair.pair(), [one.entry for one in rig.inputs], rig, 30.0)
    first, second, third = judge([*variants, broken]).trials
    for trial in (first, second):
        assert not trial.problem, trial.problem
        assert set(trial.totals) == {one.entry.label for one in rig.inputs}
        assert all(one.microseconds > 1.0 and one.spills == 0 for seen in trial.entries.values() for one in seen)
    assert third.problem
    assert not third.totals


def test_a_tuned_pair_is_green_and_no_slower(rig: Rig, sandbox: Sandbox, tmp_path: Path):
    spec = silu_pair.spec_of(tmp_path, sandbox)
    slow = silu_pair.pair(silu_pair.HONEST.replace("1024", "64"))  # tiles that waste most of a program
    found = tune(spec, slow, sandbox, seconds=30.0, prove=False, fixed=frozenset())
    assert found.changed, found.line
    whole = at_entries(spec, found.pair, spec.sweep)
    assert check_native(whole, whole.facts.source, sandbox, rig).green
