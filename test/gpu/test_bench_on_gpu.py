"""Times of real kernels on a real device, and what tricks gain: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import silu_pair
import torch

from kernel_agent.bench.measure import NotMeasured, measure_source
from kernel_agent.bench.native import check_native
from kernel_agent.bench.records import Basis, Measurement
from kernel_agent.bench.rig import Rig
from kernel_agent.sandbox import Sandbox

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="times real kernels: needs a CUDA device"),
]


@pytest.fixture(scope="module")
def timed_rig(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    made = Rig(silu_pair.spec_of(tmp_path_factory.mktemp("silu"), sandbox), sandbox)
    assert check_native(made.spec, silu_pair.pair(), sandbox, made).green
    return made


@pytest.fixture(scope="module")
def honest(timed_rig: Rig) -> Measurement:
    return time_of(timed_rig, silu_pair.HONEST)


def time_of(rig: Rig, backward: str) -> Measurement:
    return measure_source(rig.spec, silu_pair.pair(backward), rig.sandbox, rig)


def test_a_backward_is_timed_at_every_shape(honest: Measurement):
    assert honest.basis is Basis.MEASURED
    assert honest.device == torch.cuda.get_device_name()
    assert [shape.label for shape in honest.shapes] == [f"n={1 << 22}", f"n={1 << 24}"]
    small, large = honest.shapes
    assert 2.0 < large.median_us / small.median_us < 6.0, "four times the bytes"
    assert large.spread < 0.2


def test_no_time_is_below_its_bound(honest: Measurement):
    for shape in honest.shapes:
        assert shape.bound_us is not None
        assert shape.bound_us < shape.median_us, "a warm cache, or a clock that stops too early"
    assert honest.shapes[1].bound_us > 0.4 * honest.shapes[1].median_us, "one pass over memory is near the bound"


def test_both_baselines_are_timed(honest: Measurement):
    for shape in honest.shapes:
        assert shape.eager_us is not None, honest.facts
        assert shape.compiled_us is not None, honest.facts
        assert 0.5 < shape.eager_us / shape.median_us < 4.0
        assert 0.5 < shape.compiled_us / shape.median_us < 4.0


def test_the_launch_is_described(honest: Measurement):
    (kernel,) = honest.kernels
    assert kernel.name == "_silu_bwd"
    assert 8 <= (kernel.registers or 0) <= 255
    assert kernel.spills == 0
    assert kernel.bound_by == "memory"
    assert 0.7 < kernel.microseconds / honest.shapes[1].median_us < 1.2


def test_two_measurements_agree(timed_rig: Rig, honest: Measurement):
    again = time_of(timed_rig, silu_pair.HONEST)
    for one, other in zip(honest.shapes, again.shapes, strict=True):
        assert abs(one.median_us / other.median_us - 1) < 0.1


@pytest.mark.parametrize("name", ["SIDE_STREAM", "PATCHED_CLOCKS", "REMEMBERED", "TIRED", "LEFT_BEHIND"])
def test_a_trick_gains_nothing(name: str, timed_rig: Rig, honest: Measurement):
    try:
        seen = time_of(timed_rig, getattr(silu_pair, name))
    except NotMeasured:
        return
    for shape, real in zip(seen.shapes, honest.shapes, strict=True):
        assert shape.median_us > 0.85 * real.median_us, f"{shape.label}: {shape.median_us} us, really {real.median_us}"


@pytest.mark.parametrize("name", ["REMEMBERED", "TIRED", "SIDE_STREAM", "LEFT_BEHIND"])
def test_a_backward_whose_answer_is_not_there_after_every_call_is_refused(name: str, timed_rig: Rig):
    with pytest.raises(NotMeasured, match="other gradients"):
        time_of(timed_rig, getattr(silu_pair, name))


def test_a_backward_that_fails_while_it_is_timed_is_refused(timed_rig: Rig):
    with pytest.raises(NotMeasured, match="ValueError: no"):
        time_of(timed_rig, 'def backward(saved, grad_y):\n    raise ValueError("no")\n')


def test_the_command_prints_times_beside_both_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from kernel_agent.cli.main import run

    path = tmp_path / "silu_timed.py"
    path.write_text(silu_pair.pair(), encoding="utf-8")
    assert run(["bench", str(path)]) == 0
    said = capsys.readouterr().out
    assert "exact tier: GREEN" in said
    assert "native tier: GREEN" in said
    assert f"n={1 << 24}" in said
    assert torch.cuda.get_device_name() in said
