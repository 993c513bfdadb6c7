"""`kernel-agent grad`: the adjoint of a tile function on stdout, proven; wrong arguments in one message."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_agent.cli.main import run
from kernel_agent.errors import ExitCode

FILE = '''\
import triton
import triton.language as tl


@triton.jit
def scaled(x, w):
    """x, with its columns weighted."""
    return x * w[None, :]


@triton.jit
def of_bits(x):
    return (x.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiles.py"
    path.write_text(FILE)
    return path


def test_source_is_printed_and_its_proof_beside_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["grad", f"{file}::scaled", "--wrt", "w", "--shapes", "x=[8, 16], w=[16]"]) == ExitCode.OK
    shown = capsys.readouterr()
    (function,) = (node for node in ast.parse(shown.out).body if isinstance(node, ast.FunctionDef))
    assert function.name == "scaled_grad"
    assert "tl.sum(d_out * x, axis=0)" in shown.out
    assert "agree with the executor's derivative" in shown.err


@pytest.mark.parametrize(
    ("place", "shapes", "message"),
    [
        ("scaled", "x=[8, 16], w=[8]", "incompatible dimensions"),
        ("of_bits", "x=[8]", "line 13"),
        ("other", "x=[8]", "It has scaled, of_bits"),
    ],
)
def test_what_cannot_be_derived_is_said_with_nothing_printed(
    file: Path, capsys: pytest.CaptureFixture[str], place: str, shapes: str, message: str
) -> None:
    assert run(["grad", f"{file}::{place}", "--shapes", shapes]) == ExitCode.BAD_INPUT
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_adjoint_that_is_not_the_derivative_is_not_printed(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the child is a real one; what it answers is made red, as a defect of the compiler would make it
    from kernel_agent.sandbox import Message, Sandbox

    def red(self: Sandbox, job, **options):
        report = whole(self, job, **options)
        (message,) = report.messages
        record = {**message.record, "green": False, "verdict": "red: the adjoint of `w` is wrong"}
        return replace(report, messages=(Message(record, {}),))

    whole = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", red)
    assert run(["grad", f"{file}::scaled", "--shapes", "x=[8, 16], w=[16]"]) == ExitCode.RED
    shown = capsys.readouterr()
    assert "is not printed: red: the adjoint of `w` is wrong" in shown.err
    assert shown.out == ""


def test_place_without_a_function_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["grad", str(file), "--shapes", "x=[8]"]) == ExitCode.BAD_INPUT
    assert "FILE.py::FUNCTION" in capsys.readouterr().err
