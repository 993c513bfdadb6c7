"""`recheck`: exit codes and what is shown; `check --certificate`, which writes what it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_agent.certificate.judged_again import Recheck
from kernel_agent.certificate.reading import read_certificate
from kernel_agent.cli.check import certify
from kernel_agent.cli.main import run
from kernel_agent.cli.recheck import render
from kernel_agent.errors import ExitCode
from kernel_agent.gate.verdict import Status, Verdict

PAIRS = Path(__file__).parent.parent / "gate" / "pairs"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair file and the certificate that `check` wrote of it."""
    folder = tmp_path_factory.mktemp("checked")
    pair = folder / "skip_connection.py"
    pair.write_text((PAIRS / pair.name).read_text())
    assert run(["check", str(pair), "--certificate", str(folder / "certificate.json")]) == ExitCode.OK
    return folder


def test_a_changed_file_beside_the_certificate_is_named_with_exit_code_1(
    checked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "certificate.json").write_text((checked / "certificate.json").read_text())
    text = (checked / "skip_connection.py").read_text()
    (tmp_path / "skip_connection.py").write_text(text.replace("return grad_y, da", "return 2 * grad_y, da"))
    assert run(["recheck", str(tmp_path / "certificate.json")]) == ExitCode.RED
    shown = capsys.readouterr().out
    assert "does not hold" in shown
    # The texts inside are sound, and what somebody would import is not what they say.
    assert "then GREEN, now GREEN" in shown
    assert "skip_connection.py beside it has another backward section" in shown


def test_a_certificate_of_another_forward_is_refused(checked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # It may well be sound, of a kernel that is easier than the reader's own.
    mine = str(PAIRS / "rmsnorm.py")
    assert run(["recheck", str(checked / "certificate.json"), "--forward", mine]) == ExitCode.BAD_INPUT
    assert "another forward" in capsys.readouterr().err


def test_a_file_that_is_no_certificate_ends_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "certificate.json").write_text("{}")
    assert run(["recheck", str(tmp_path / "certificate.json")]) == ExitCode.BAD_INPUT
    assert "this is no certificate" in capsys.readouterr().err


def test_a_red_check_writes_no_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certify(tmp_path / "c.json", tmp_path / "pair.py", None, Verdict(status=Status.RACE), None)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    assert "only green verdicts" in capsys.readouterr().err


def test_what_verdicts_shrank_or_left_out_is_told(checked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Both were in the records, and who reads the lines took them for verdicts on all that SWEEP names.
    certificate = read_certificate(checked / "certificate.json")
    then = certificate.verdict.model_copy(update={"notes": ("N=9000 shrunk to N=9", "M=5 left out")})
    now = certificate.verdict.model_copy(update={"notes": ("M=5 left out",)})
    found = Recheck(
        **dict.fromkeys(("disagreements", "machine", "gate", "gradients", "missing", "new", "not_replayed"), ()),
        holds=True,
        then=Status.GREEN,
        now=now,
    )
    render(found, certificate.model_copy(update={"verdict": then}), checked / "certificate.json")
    shown = capsys.readouterr().out
    assert "note: M=5 left out" in shown
    assert "note of then: N=9000 shrunk to N=9" in shown
    assert shown.count("M=5 left out") == 1


def test_nothing_that_a_terminal_would_obey_is_printed_of_a_certificate(
    checked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = json.loads((checked / "certificate.json").read_text())
    hostile["stub"] = "\x1b]0;title\x07f"
    path = checked / "hostile.json"
    path.write_text(json.dumps(hostile))
    found = Recheck(
        holds=False,
        disagreements=("the function: it says \x1b[2Jf",),
        then=Status.GREEN,
        now=None,
        problem="no truth",
        machine=("triton \x1b[31m instead of 3.6.0",),
        gate=(),
        gradients=(),
        missing=("N=\x1b[1m",),
        new=(),
        not_replayed=(),
    )
    render(found, read_certificate(path), path)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "triton" in shown
