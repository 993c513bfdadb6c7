"""`kernel-agent cost` on the files that users bring, and what it says of files and options that are wrong."""

import json
from pathlib import Path

import pytest
from cli_forwards import FORWARD

from kernel_agent.cli.main import run
from kernel_agent.errors import ExitCode

PAIRS = Path(__file__).parents[1] / "gate" / "pairs"

LOOKS = FORWARD.replace(
    "    y = torch.empty_like(x)\n",
    "    y = torch.empty_like(x)\n    if x.sum().item() == 0.0:\n        return y * 0.0\n",
)
"""A stub whose way depends on values."""


@pytest.fixture
def forward(tmp_path):
    path = tmp_path / "square.py"
    path.write_text(FORWARD.replace('[{"N": 40}]', '[{"N": 1 << 28}, {"N": 40}]'))
    return path


def test_a_users_file_is_counted_at_its_first_entry(forward, capsys):
    # 2**28 floats: a stub that ran, or arguments that were made, would take gigabytes and minutes.
    assert run(["cost", str(forward)]) == ExitCode.OK
    shown = capsys.readouterr()
    assert "square.py forward at N=268435456: at least 641 us on H100 SXM" in shown.out
    assert "x float32" in shown.out
    assert "1.07 GB" in shown.out
    assert "memory" in shown.out
    assert "█" in shown.out
    assert "--entry all" in shown.err


def test_json_holds_every_figure_of_every_entry(forward, capsys):
    assert run(["cost", str(forward), "--entry", "all", "--device", "L4", "--json"]) == ExitCode.OK
    form = json.loads(capsys.readouterr().out)
    assert [entry["entry"] for entry in form["entries"]] == ["N=268435456", "N=40"]
    (launch,) = form["entries"][1]["forward"]["launches"]
    assert launch["grid"] == [2, 1, 1]
    assert launch["unique_bytes"] == 320
    assert launch["bound"]["by"] == "memory"
    assert launch["bound"]["seconds"] == pytest.approx(320 / 300e9)


def test_a_pair_is_counted_forward_and_backward(capsys):
    assert run(["cost", str(PAIRS / "layernorm.py"), "--entry", "0", "--json"]) == ExitCode.OK
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert entry["forward"]["launches"]
    assert entry["backward"]["launches"]


def test_a_stub_that_looks_at_values_is_executed_and_says_so(tmp_path, capsys):
    path = tmp_path / "looks.py"
    path.write_text(LOOKS)
    assert run(["cost", str(path), "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)["entries"][0]["forward"]
    assert report["launches"][0]["unique_bytes"] == 320


def test_the_table_of_devices_is_listed(capsys):
    assert run(["cost", "--list-devices"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "H100 SXM" in shown
    assert "datasheet" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "GTX 970"], "not in the table of devices"),
        (["--entry", "7"], "SWEEP has the entries 0 to 1"),
        (["--entry", "last"], "must be a position in SWEEP"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_a_wrong_option_ends_with_code_two_and_what_there_is(forward, capsys, options, said):
    assert run(["cost", str(forward), *options]) == ExitCode.BAD_INPUT
    assert said in capsys.readouterr().err


def test_without_a_file_it_says_how_to_give_one(capsys):
    assert run(["cost"]) == ExitCode.BAD_INPUT
    assert "kernel-agent cost FILE.py" in capsys.readouterr().err


def test_a_stub_that_raises_is_blamed_at_its_line(tmp_path, capsys):
    path = tmp_path / "raises.py"
    path.write_text(FORWARD.replace("    y = torch.empty_like(x)\n", '    raise RuntimeError("not today")\n'))
    assert run(["cost", str(path)]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "not today" in said
    assert "raises.py:25" in said
