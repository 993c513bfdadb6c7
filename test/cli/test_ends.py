"""How a command ends that cannot do its work: the message, the exit code, and the record that programs read."""

import json

import pytest
from cli_forwards import FORWARD
from command_line import command, kernel_agent

from kernel_agent.cli import main
from kernel_agent.cli.main import run
from kernel_agent.errors import ExitCode


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "square.py").write_text(FORWARD)
    monkeypatch.chdir(tmp_path)
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_a_dry_run_without_a_key_shows_the_price_of_the_default_model(home, capsys):
    # The dry run is for those who have not paid yet; asking them for a key first made it useless.
    assert run(["--file-path", "square.py", "--dry-run", "--no-rag"]) == 0
    shown = capsys.readouterr()
    assert "square_kernel" in shown.out
    assert "no key is set, and a run would use compiler instead" in shown.err
    assert "$0." in shown.err
    assert "switched off (--no-rag)" in shown.err, "what the search has to say"


def test_a_dry_run_of_the_manual_backend_has_no_price(home, capsys):
    assert run(["--file-path", "square.py", "--dry-run", "--no-rag", "--backend", "manual"]) == 0
    said = capsys.readouterr().err
    assert "no price" in said
    assert "$" not in said


def test_a_missing_gpu_is_told_before_anything_runs(home, capsys):
    import torch

    device = f"cuda:{torch.cuda.device_count()}"
    assert run(["--file-path", "square.py", "--backend", "manual", "--device", device]) == ExitCode.ENVIRONMENT
    assert f"--device {device}" in capsys.readouterr().err
    assert not (home / "generated").exists()


def test_a_cost_limit_without_a_price_is_refused_before_anything_runs(home, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    limited = ["--file-path", "square.py", "--backend", "openai", "--model", "home-made", "--max-cost-usd", "1"]
    assert run(limited) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "home-made has no known price" in said
    assert "--max-tokens" in said
    assert not (home / "generated").exists()


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--reasoning-effort", "extreme", "minimal, low, medium or high"),
        ("--device", "banana", "auto, cpu, cuda or cuda:N"),
        ("--backend", "oracle", "openai, anthropic, manual"),
        ("--topk", "99", "from 0 to 32"),
        ("--max-iters", "0", "at least 1"),
    ],
)
def test_a_wrong_value_is_told_under_the_name_of_its_option(home, capsys, option, value, allowed):
    assert run(["--file-path", "square.py", option, value]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert option in said
    assert allowed in said


def test_a_wrong_limit_of_resume_is_no_traceback(home, capsys):
    assert run(["resume", "latest", "--max-iters", "0"]) == ExitCode.BAD_INPUT
    assert "--max-iters must be" in capsys.readouterr().err


def test_options_without_a_file_say_that_the_file_is_missing(home, capsys):
    assert run(["--topk", "3"]) == ExitCode.BAD_INPUT
    shown = capsys.readouterr()
    assert "--file-path is missing" in shown.err
    assert shown.out == "", "the whole help hides what is wrong"


@pytest.mark.parametrize("pattern", ["ok-*", "**", "[", "2*"])
def test_a_pattern_is_no_run_id(home, capsys, pattern):
    assert run(["trace", pattern]) == ExitCode.BAD_INPUT
    assert "no run has this id" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--file-path", "absent.py"], ["--file-path", "square.py", "--topk", "x"], ["check", "absent.py"]],
    ids=["file", "usage", "check"],
)
def test_wrong_input_is_a_record_with_json(home, capsys, arguments):
    assert run([*arguments, "--json"]) == ExitCode.BAD_INPUT
    record = json.loads(capsys.readouterr().out)
    assert record["error"]
    assert record["remedy"]
    assert record["exit_code"] == 2


@pytest.fixture
def defect(monkeypatch):
    def broken(file):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(main, "_read_first", broken)


def test_a_defect_of_ours_is_one_line_and_its_traceback_a_file(home, capsys, defect, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(home))
    assert run(["--file-path", "square.py"]) == ExitCode.RED
    said = capsys.readouterr().err
    assert "internal error: RuntimeError: two lines" in said
    assert "Traceback" not in said
    (file,) = home.glob("kernel-agent-*.txt")
    assert file.name in said.replace("\n", "")
    assert 'raise RuntimeError("two' in file.read_text()


def test_a_defect_of_ours_shows_its_traceback_when_asked(home, capsys, defect):
    assert run(["--file-path", "square.py", "-v"]) == ExitCode.RED
    assert "Traceback" in capsys.readouterr().err


UNREACHABLE = ("--backend", "openai", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--no-rag")


def test_a_provider_out_of_reach_leaves_a_record_a_reason_and_the_resume_line(home):
    ended = kernel_agent("--file-path", "square.py", *UNREACHABLE, "--draft", "none", "--json", cwd=home)
    assert ended.code == ExitCode.ENVIRONMENT
    record = json.loads(ended.out)
    assert record["verdict"] is None
    assert record["outcome"] is None
    assert "cannot reach" in record["reason"]
    assert record["exit_code"] == 3
    assert record["resume"].startswith("kernel-agent resume generated/square-")
    assert record["resume"] in ended.err
    assert ended.err.count("cannot reach") == 1, "told once"


def test_a_budget_below_the_first_ask_is_the_reason_in_record_and_table(home):
    words = ("--backend", "manual", "--no-rag", "--max-tokens", "9", "--draft", "none")
    ended = kernel_agent("--file-path", "square.py", *words, cwd=home)
    assert ended.code == ExitCode.RED
    assert "no reply held code" not in ended.out + ended.err, "nothing was asked"
    assert "nothing was asked: the next ask needs" in ended.err
    (folder,) = [path for path in home.glob("generated/*/runs/*") if not path.is_symlink()]
    again = kernel_agent("resume", folder.name, "--json", cwd=home)
    record = json.loads(again.out)
    assert record["verdict"] is None
    assert "--max-tokens" in record["reason"]


def test_a_reader_that_is_gone_when_a_run_stops_sees_no_traceback(home):
    # The trace of a stopped run is printed while its error is handled: a broken pipe there was met by nobody.
    words = ("--backend", "manual", "--no-wait", "--no-rag", "--draft", "none", "-q")
    waits = command("--file-path", "square.py", *words, cwd=home)
    waits.stdout.close()
    said = waits.stderr.read()
    waits.stderr.close()
    assert waits.wait(60) == ExitCode.ENVIRONMENT
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        (FORWARD, "no META and no section markers"),
        ("def backward(saved, g):\n    return g\n", "no META and no section markers"),
        ('META = dict(grads=("x",))\n', "no section markers"),
        ("# --- forward ---\n", "no META"),
    ],
)
def test_a_file_that_is_no_pair_is_told_what_a_pair_is(home, capsys, text, lacks):
    # Half of them were told that no function is marked with @autodiff, which a pair file has no use for.
    (home / "pair.py").write_text(text)
    assert run(["check", "pair.py"]) == ExitCode.BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert f"pair.py:{text.count(chr(10))}: this is no pair file, it has {lacks}:" in said
    for word in ("META = dict(", "# --- forward ---", "# --- backward ---", "# --- check ---", "pair-format.md"):
        assert word in said
