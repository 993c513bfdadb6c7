"""The main job from the command line: streams, exit codes, and the commands that look at runs afterwards.

Runs are real: the fork server, the gate and the delivery all work; only the replies were written beforehand.
"""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from cli_forwards import FORWARD, RIGHT, WRONG
from command_line import command, kernel_agent


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "square.py").write_text(FORWARD)
    return folder


@pytest.fixture(scope="module")
def waiting(home):
    """A run that asked once and found no reply."""
    words = ("--backend", "manual", "--no-wait", "--no-rag", "--no-reflect", "--draft", "none", "--mutant-seconds", "0")
    return kernel_agent("--file-path", "square.py", *words, cwd=home)


@pytest.fixture(scope="module")
def run_folder(home, waiting):
    (folder,) = [path for path in home.glob("generated/square-*/runs/*") if not path.is_symlink()]
    return folder


@pytest.fixture(scope="module")
def delivered(home, waiting, run_folder):
    """The same run after a wrong and a right reply."""
    (run_folder / "replies" / "0001.md").write_text(WRONG)
    (run_folder / "replies" / "0002.md").write_text(RIGHT)
    return kernel_agent("resume", run_folder.name, "--max-iters", "2", cwd=home)


def test_missing_manual_reply_ends_with_code_four(waiting):
    # Scripts that drive the manual backend tell "answer me" from "failed" by this code alone.
    assert waiting.code == 4, waiting.err
    assert waiting.err.count("asks/0001.md waits for a reply") == 1, "told once"
    assert "error" not in waiting.err, "waiting is a normal state"
    assert "kernel-agent resume" in waiting.err


def test_a_repaired_run_is_delivered(home, delivered):
    assert delivered.code == 0, delivered.err
    assert len(list(home.glob("generated/square-*/square_backward.py"))) == 1
    assert len(list(home.glob("generated/square-*/certificate.json"))) == 1


def test_trace_goes_to_stdout_and_progress_to_stderr(delivered):
    # `kernel-agent ... > trace.txt` has to leave the trace alone.
    assert "WRONG_GRADIENT" in delivered.out
    assert "GREEN" in delivered.out
    assert "## Phase 2" in delivered.out
    assert "## Phase 2" not in delivered.err
    assert delivered.err.startswith("resumed")


def test_a_time_is_labelled_modelled_where_there_is_no_gpu(delivered):
    import torch

    if torch.cuda.is_available():
        pytest.skip("speaks of machines without a GPU")
    assert "phase 3 optimize" in delivered.err
    assert "modelled, not measured" in delivered.err


def test_runs_lists_the_run_with_its_outcome(home, delivered, run_folder):
    listed = kernel_agent("runs", cwd=home)
    assert listed.code == 0
    assert "delivered" in listed.out


def test_trace_shows_the_run_again(home, delivered, run_folder):
    shown = kernel_agent("trace", str(run_folder), cwd=home)
    assert shown.out == delivered.out


def test_the_delivered_file_passes_check(home, delivered):
    (operator,) = home.glob("generated/square-*/square_backward.py")
    checked = kernel_agent("check", str(operator), "--json", cwd=home)
    assert checked.code == 0, checked.err
    assert json.loads(checked.out)["status"] == "GREEN"


def test_a_broken_delivered_file_fails_check(home, delivered, tmp_path):
    # `check` must judge the file in front of it, not remember the verdict of the run.
    (operator,) = home.glob("generated/square-*/square_backward.py")
    broken = tmp_path / "broken.py"
    broken.write_text(operator.read_text().replace("2.0 * factor * x * g", "2.1 * factor * x * g"))
    checked = kernel_agent("check", str(broken), cwd=home)
    assert checked.code == 1
    assert "WRONG_GRADIENT" in checked.out


def test_check_says_what_stands_behind_the_truth_it_judged_by(tmp_path):
    # A green verdict is worth what the truth is worth: differences and the file's own reference are looked at too.
    pair = Path(__file__).parents[1] / "gate" / "pairs" / "softmax.py"
    checked = kernel_agent("check", str(pair), cwd=tmp_path)
    assert checked.code == 0, checked.err
    line = next(line for line in checked.out.splitlines() if line.startswith("truth: "))
    assert "agrees with central differences" in line
    assert "the outputs and the gradients agree with `reference`" in line


def test_no_green_verdict_ends_with_code_one_and_one_record(home, delivered, tmp_path, run_folder):
    recorded = tmp_path / "recorded"
    (recorded / "replies").mkdir(parents=True)
    (recorded / "replies" / "0001.md").write_text(WRONG)
    arguments = ("--file-path", "square.py", "--replay", str(recorded), "--max-iters", "1", "--no-rag", "--json", "-q")
    red = kernel_agent(*arguments, cwd=home)
    assert red.code == 1, red.err
    assert json.loads(red.out)["verdict"]["status"] == "WRONG_GRADIENT"
    assert red.err == ""


def test_dry_run_prints_the_prompt_and_asks_nothing(home, tmp_path):
    arguments = (
        "--file-path",
        "square.py",
        "--dry-run",
        "--backend",
        "openai",
        "--no-rag",
        "--draft",
        "none",
        "--out",
        str(tmp_path / "out"),
    )
    dry = kernel_agent(*arguments, cwd=home)
    assert dry.code == 0, dry.err
    assert "square_kernel" in dry.out
    assert "$" in dry.err
    assert not (tmp_path / "out").exists()


def test_missing_key_is_one_line_that_names_the_variable(home):
    missing = kernel_agent("--file-path", "square.py", "--backend", "anthropic", "--no-rag", cwd=home)
    assert missing.code == 3
    assert "ANTHROPIC_API_KEY" in missing.err


def test_a_file_without_a_mark_ends_with_code_two_and_its_line(home, tmp_path):
    bare = tmp_path / "bare.py"
    bare.write_text(FORWARD.replace('@autodiff(inputs_require_grad=("x",))\n', ""))
    refused = kernel_agent("--file-path", str(bare), "--backend", "manual", cwd=home)
    assert refused.code == 2
    assert "bare.py" in refused.err
    assert "Traceback" not in refused.err


def test_a_run_that_waits_leaves_its_trace_on_stdout(waiting, run_folder):
    # `kernel-agent ... > LOGS/x.txt` left an empty file unless the run came to its end.
    assert waiting.out.startswith("# square: run ")
    assert "### Ask 1 (draft)" in waiting.out
    assert "waits for a reply" in waiting.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_children_and_prints_trace_and_resume_line(home, tmp_path, number):
    # Schedulers and `timeout` send SIGTERM: it left the children running and the ledger without a word.
    words = ("--backend", "manual", "--no-rag", "--draft", "none")
    process = command("--file-path", "square.py", *words, "--out", str(tmp_path), cwd=home)
    asks = lambda: list(Path(tmp_path).glob("*/runs/*/asks/0001.md"))  # noqa: E731 - polled below
    deadline = time.monotonic() + 90
    while not asks() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert process.returncode == 130, err
    assert "kernel-agent resume" in err
    assert out.startswith("# square: run ")
    assert "### Interrupted" in out
    assert alive == []


def test_new_scaffolds_a_bare_file_that_then_only_wants_shapes(home, tmp_path):
    bare = tmp_path / "bare.py"
    lines = FORWARD.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith("@triton.jit"))
    imports = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
    bare.write_text(imports + "".join(line for line in lines[start:] if not line.startswith("@autodiff")))
    made = kernel_agent("new", str(bare), cwd=home)
    assert made.code == 0, made.err
    assert "SWEEP" in made.out
    assert "def make_args" in made.out
    assert "@autodiff" in made.out
