"""`--deterministic`: what is told of sums without an order, and what is refused because of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernel_agent.cli.main import run
from kernel_agent.errors import ExitCode

LAYERNORM = Path(__file__).parents[1] / "gate" / "pairs" / "layernorm.py"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copy(LAYERNORM, tmp_path))


def test_check_refuses_atomic_sums_only_where_the_same_bits_are_asked_for(pair, capsys):
    assert run(["check", str(pair)]) == ExitCode.OK
    assert "note: the order of float additions is not fixed: kernel _ln_bwd adds to DW" in capsys.readouterr().out
    assert run(["check", str(pair), "--deterministic"]) == ExitCode.RED
    shown = capsys.readouterr().out
    assert "NONDETERMINISTIC" in shown
    assert "rows of its own" in shown, "what to do instead"


def test_derive_takes_no_schedule_with_atomic_sums_where_the_same_bits_are_asked_for(pair, capsys):
    # The schedule that adds atomically can be asked for by name: refused here, it would be taken without the option.
    atomics = ["derive", str(pair), "--schedule", "owned", "--no-tune"]
    assert run([*atomics, "--deterministic"]) == ExitCode.BAD_INPUT
    assert "NONDETERMINISTIC" in capsys.readouterr().err
    assert run([*atomics]) == ExitCode.OK
    assert "tl.atomic_add" in capsys.readouterr().out
