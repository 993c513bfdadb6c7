"""`kernel-agent sanitize`: what it prints and how it ends for clean, broken, stopping and unreadable files."""

import json

import pytest
from cli_forwards import FORWARD

from kernel_agent.cli.main import run
from kernel_agent.data import pairs_root
from kernel_agent.errors import ExitCode


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_clean_forward_ends_with_zero(home, capsys):
    (home / "square.py").write_text(FORWARD)
    assert run(["sanitize", "square.py"]) == ExitCode.OK
    assert "square.py: clean at 1 SWEEP entry" in capsys.readouterr().out


def test_a_load_without_its_mask_is_told_once_with_the_first_entry_that_shows_it(home, capsys):
    broken = FORWARD.replace("tl.load(X + at, mask=at < N)", "tl.load(X + at)")
    (home / "square.py").write_text(broken.replace('[{"N": 40}]', '[{"N": 64}, {"N": 40}, {"N": 50}]'))
    assert run(["sanitize", "square.py"]) == ExitCode.RED
    said = capsys.readouterr().out
    line = 1 + broken.splitlines().index("    x = tl.load(X + at)")
    assert "1 finding at 3 SWEEP entries" in said
    assert f"square_kernel, square.py:{line}: load outside of x: element 40" in said
    assert "; at N=40 and 1 more" in said


def test_offsets_are_judged_at_sizes_that_no_cpu_could_run(home, capsys):
    (home / "square.py").write_text(FORWARD.replace('[{"N": 40}]', '[{"N": 3_000_000_000}]'))
    assert run(["sanitize", "square.py", "--json"]) == ExitCode.RED
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert part["label"] == "N=3000000000"
    assert part["run_at"] != part["label"]
    assert [finding["kind"] for finding in part["report"]["findings"]] == ["WRAPPED_OFFSET"] * 2
    assert [finding["buffer"] for finding in part["report"]["findings"]] == ["x", "Y"]


def test_a_pair_is_judged_with_its_backward(home, capsys):
    source = (pairs_root() / "softmax" / "softmax_row.py").read_text()
    right = "tl.store(DX + row * N + c, y * (dy - tl.sum(y * dy, 0)), mask=inside)"
    assert right in source
    (home / "pair.py").write_text(source)
    assert run(["sanitize", "pair.py"]) == ExitCode.OK
    assert "backward" in capsys.readouterr().out
    (home / "pair.py").write_text(source.replace(right, right.replace("row * N", "row * (N - 1)")))
    assert run(["sanitize", "pair.py"]) == ExitCode.RED
    said = capsys.readouterr().out
    assert "race: two programs meet at one element" in said
    assert "unwritten output" in said


def test_a_stub_that_raises_is_wrong_input_with_the_line(home, capsys):
    (home / "square.py").write_text(
        FORWARD.replace("    y = torch.empty_like(x)\n", "    y = torch.empty_like(x)\n    raise ValueError('odd')\n")
    )
    assert run(["sanitize", "square.py"]) == ExitCode.BAD_INPUT
    assert "forward stopped: ValueError: odd (square.py:" in capsys.readouterr().out


def test_a_file_without_a_stub_is_wrong_input(home, capsys):
    (home / "nothing.py").write_text("x = 1\n")
    assert run(["sanitize", "nothing.py"]) == ExitCode.BAD_INPUT
    assert "nothing.py" in capsys.readouterr().err
