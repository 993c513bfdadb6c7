"""`kernel-agent explain`: what it prints of a forward, for people and as JSON."""

import json

import pytest
from cli_forwards import FORWARD

from kernel_agent.cli.main import run
from kernel_agent.errors import ExitCode
from kernel_agent.pairs.forward_facts import ForwardFacts


@pytest.fixture
def forward(tmp_path):
    path = tmp_path / "square.py"
    path.write_text(FORWARD)
    return path


def test_a_forward_is_explained_launch_by_launch(forward, capsys):
    assert run(["explain", str(forward)]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "square.py forward at N=" in shown
    assert "load   X (x) line" in shown
    assert "x: no sum across programs" in shown


def test_json_reads_back_as_the_record(forward, capsys):
    assert run(["explain", str(forward), "--json"]) == ExitCode.OK
    facts = ForwardFacts.model_validate(json.loads(capsys.readouterr().out))
    assert facts.launches


def test_a_file_that_is_not_there_is_told(tmp_path, capsys):
    assert run(["explain", str(tmp_path / "none.py")]) == ExitCode.BAD_INPUT
    assert "none.py" in capsys.readouterr().err
