"""`kernel-agent derive`: of an unchanged file, what was derived before is printed again, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_forwards import FORWARD

from kernel_agent.cli.main import run
from kernel_agent.compiler.tuning.tune import Tuned
from kernel_agent.errors import ExitCode


@pytest.fixture
def forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "square.py"
    path.write_text(FORWARD)
    return path


def test_the_second_derivation_of_a_file_is_the_first_one_printed_again(forward, tmp_path, capsys, monkeypatch):
    assert run(["derive", str(forward)]) == ExitCode.OK
    first = capsys.readouterr()
    assert "def backward(saved, grad_y" in first.out
    # A child could only be started by deriving again.
    monkeypatch.setattr("kernel_agent.sandbox.Sandbox.run", None)
    assert run(["derive", str(forward), "--explain"]) == ExitCode.OK
    again = capsys.readouterr()
    assert again.out == first.out
    assert "derived and proven before; --no-cache derives it again" in again.err
    assert "schedule: owned" in again.err


def test_an_edited_file_is_derived_again(forward, capsys):
    # `2 * factor * x` of the cached pair would be the gradient of another forward.
    assert run(["derive", str(forward)]) == ExitCode.OK
    capsys.readouterr()
    forward.write_text(FORWARD.replace("x * x * factor", "x * factor"))
    assert run(["derive", str(forward)]) == ExitCode.OK
    again = capsys.readouterr()
    assert "derived and proven before" not in again.err
    assert "x * 2" not in again.out


def test_an_unknown_schedule_is_refused_with_the_known_ones(forward, capsys):
    assert run(["derive", str(forward), "--schedule", "fastest"]) == ExitCode.BAD_INPUT
    assert "Take one of: rows" in capsys.readouterr().err


def refusing(*schedules: str):
    """A GPU's tuner whose native tier refuses the pairs of some schedules, told apart by what they do."""

    def tune(spec, pair, sandbox, **_):
        schedule = "plain" if "tl.atomic_add(" in pair else "owned"
        if schedule in schedules:
            return Tuned(pair, False, "not tuned", refused="the native tier says CRASHED: out of shared memory")
        return Tuned(pair, False, "none of 3 variants is faster", 3)

    return tune


def test_on_a_gpu_that_refuses_a_backward_another_schedule_is_given_out(forward, capsys, monkeypatch):
    # What the gate proves in float64 may not compile for the GPU: it was printed all the same, with a remark.
    monkeypatch.setattr("kernel_agent.cli.derive._gpu", lambda: "NVIDIA Test")
    monkeypatch.setattr("kernel_agent.compiler.tuning.tune.tune", refusing("owned"))
    assert run(["derive", str(forward), "--explain"]) == ExitCode.OK
    told = capsys.readouterr()
    assert "tl.atomic_add(" in told.out
    assert "owned: the native tier says CRASHED: out of shared memory; another schedule is tried" in told.err
    assert "not taken: owned: the native tier says CRASHED" in told.err


def test_on_a_gpu_that_refuses_all_backwards_none_is_given_out(forward, capsys, monkeypatch):
    # A wrong backward on stdout would be taken for a proven one.
    monkeypatch.setattr("kernel_agent.cli.derive._gpu", lambda: "NVIDIA Test")
    monkeypatch.setattr("kernel_agent.compiler.tuning.tune.tune", refusing("owned", "plain"))
    assert run(["derive", str(forward)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr()
    assert not told.out
    assert "no derived backward is right on this GPU" in told.err
    assert "Please report this forward" in told.err, "nothing is wrong with it: the defect is ours"


def test_a_forward_that_leaves_its_tensors_is_told_where_and_not_to_report_it(forward, capsys):
    # The gate finds the backward out of bounds, in a line that the user did not write; we were asked for a mend.
    unmasked = FORWARD.replace("tl.load(X + at, mask=at < N)", "tl.load(X + at)")
    forward.write_text(unmasked)
    assert run(["derive", str(forward)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    line = 1 + unmasked.splitlines().index("    x = tl.load(X + at)")
    assert f"the forward itself is at fault: out of bounds: square_kernel, square.py:{line}: load outside of x" in told
    assert "Mask the access" in told
    assert "report" not in told


def test_programs_that_store_to_one_element_are_told_as_the_race_that_they_are(forward, capsys):
    # Which of them comes last is by chance: the gate says that a gradient is wrong, and nothing of the forward.
    overlapping = "tl.store(Y + at // 32 * 16 + at % 32, x * x * factor, mask=at < N)"
    forward.write_text(FORWARD.replace("tl.store(Y + at, x * x * factor, mask=at < N)", overlapping))
    assert run(["derive", str(forward)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "the forward itself is at fault: race: square_kernel" in told
    assert "Let one program store each element" in told
    assert "report" not in told


def test_a_proven_backward_of_a_forward_that_reads_what_nothing_wrote_comes_with_a_word_about_that(forward, capsys):
    # A sum that starts with whatever memory holds has a right gradient, and was printed as if all were well.
    adding = FORWARD.replace("tl.store(Y + at, x * x * factor, mask=at < N)", "tl.atomic_add(Y, tl.sum(x * x))")
    forward.write_text(adding.replace("torch.empty_like(x)", "torch.empty(1, device=x.device)"))
    assert run(["derive", str(forward)]) == ExitCode.OK
    told = capsys.readouterr()
    assert "def backward(saved, grad_y" in told.out
    assert "the forward itself at N=40: square_kernel, square.py:" in told.err
    assert "updates memory that nothing wrote" in told.err
    assert "kernel-agent sanitize shows all that is wrong with the forward" in told.err


def test_a_make_args_that_raises_is_told_with_its_entry(forward, capsys):
    # It is the user's to correct, and no backward was tried.
    forward.write_text(FORWARD.replace("    generator =", "    raise ValueError('no such N')\n    generator ="))
    assert run(["derive", str(forward)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "make_args fails for N=40: ValueError: no such N" in told
    assert "report" not in told
