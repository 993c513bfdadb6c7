"""The command line answers at once and says what it offers."""

import subprocess
import sys
import time

import pytest

from kernel_agent import __version__
from kernel_agent.cli.main import run


def test_help_starts_within_half_a_second():
    # Best of three on a shared machine: importing torch, pydantic or an SDK on this path costs more than the bound.
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "kernel_agent", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


def test_help_imports_nothing_heavy():
    # The time bound alone can pass by luck on a fast machine; this names the culprit.
    code = (
        "import sys; from kernel_agent.cli.main import run; run(['--help']); "
        "heavy = ('torch', 'triton', 'pydantic', 'openai', 'anthropic', 'faiss', 'numpy'); "
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_every_published_option_is_listed(capsys):
    # Users of the published tool bring their command lines along: a renamed option breaks them.
    run(["--help"])
    shown = capsys.readouterr().out
    published = "--file-path --backend --openai-model --reasoning-effort --topk --min-sim --rag-exclude --max-iters"
    assert [name for name in (*published.split(), "--min-rel-impr") if name not in shown] == []


@pytest.mark.parametrize("name", ["check", "resume", "runs", "trace", "dataset", "rag", "doctor", "new"])
def test_every_subcommand_has_help(name, capsys):
    assert run([name, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_missing_file_ends_with_code_two_and_a_remedy(capsys, tmp_path):
    # A traceback here would be the first thing a new user sees.
    assert run(["--file-path", str(tmp_path / "absent.py")]) == 2
    shown = capsys.readouterr().err
    assert "absent.py" in shown
    assert "Traceback" not in shown


def test_unknown_option_ends_with_code_two(capsys):
    assert run(["--no-such-option"]) == 2
