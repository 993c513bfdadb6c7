"""Who is asked when nobody says, and what is missing when nobody can be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recorded_run import FORWARD, record
from scripted_server import Answer, ScriptedServer

from kernel_agent.config import Backend, RunConfig
from kernel_agent.errors import ExitCode, InputError
from kernel_agent.models import Conversation, Exchange, choose_backend, make_model
from kernel_agent.models.errors import BadRecording, MissingKey

OPENAI = {"OPENAI_API_KEY": "sk-1"}
ANTHROPIC = {"ANTHROPIC_API_KEY": "sk-ant-1"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    return path


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "LOGS"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("environ", "backend", "why"),
    [
        (OPENAI, Backend.OPENAI, "OPENAI_API_KEY is set"),
        (ANTHROPIC, Backend.ANTHROPIC, "ANTHROPIC_API_KEY is set"),
        ({**ANTHROPIC, **OPENAI}, Backend.OPENAI, "OPENAI_API_KEY is set"),
        ({**ANTHROPIC, "OPENAI_API_KEY": " "}, Backend.ANTHROPIC, "ANTHROPIC_API_KEY is set"),
    ],
)
def test_a_key_decides(file: Path, recordings: Path, environ: dict[str, str], backend: Backend, why: str) -> None:
    choice = choose_backend(RunConfig(file=file), environ, recordings=recordings)
    assert choice.backend is backend
    assert choice.why == why


def test_the_command_line_beats_a_key(file: Path) -> None:
    choice = choose_backend(RunConfig(file=file, backend=Backend.MANUAL), OPENAI)
    assert (choice.backend, choice.why) == (Backend.MANUAL, "chosen with --backend")


def test_a_server_needs_no_key(file: Path, recordings: Path) -> None:
    config = RunConfig(file=file, base_url="http://localhost:11434/v1")
    assert choose_backend(config, {}, recordings=recordings).backend is Backend.OPENAI


def test_without_key_the_compiler_derives_though_a_recorded_run_of_the_same_forward_is_at_hand(
    file: Path, recordings: Path, conversation: Conversation
) -> None:
    # Whoever gives a file wants its backward as this version makes it, not what a model said of it once.
    record(recordings / "identity", conversation, "first")
    choice = choose_backend(RunConfig(file=file), {}, recordings=recordings)
    assert (choice.backend, choice.why) == (Backend.COMPILER, "no key is set; the compiler needs none")
    assert make_model(RunConfig(file=file), file.parent, environ={}).name == "compiler"


def test_replay_finds_the_shipped_run_by_itself(file: Path, recordings: Path, conversation: Conversation) -> None:
    record(recordings / "identity", conversation, "first")
    choice = choose_backend(RunConfig(file=file, backend=Backend.REPLAY), OPENAI, recordings=recordings)
    assert choice.replay == recordings / "identity"


def test_replay_without_a_run_says_so(file: Path, recordings: Path) -> None:
    with pytest.raises(BadRecording):
        choose_backend(RunConfig(file=file, backend=Backend.REPLAY), OPENAI, recordings=recordings)


def test_a_file_that_cannot_be_read_is_the_users_error(tmp_path: Path, recordings: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.py"):
        choose_backend(RunConfig(file=tmp_path / "missing.py", backend=Backend.REPLAY), {}, recordings=recordings)


@pytest.mark.parametrize(
    ("backend", "variable"), [(Backend.OPENAI, "OPENAI_API_KEY"), (Backend.ANTHROPIC, "ANTHROPIC_API_KEY")]
)
def test_a_missing_key_is_one_line_that_names_the_variable(file: Path, backend: Backend, variable: str) -> None:
    with pytest.raises(MissingKey) as caught:
        make_model(RunConfig(file=file, backend=backend), file.parent, environ={})
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
    assert str(caught.value).startswith(f"{variable} is not set")
    assert "\n" not in str(caught.value)


def test_a_server_without_a_model_name_is_asked_about(file: Path) -> None:
    with pytest.raises(InputError, match=r"which model of http://localhost:8000/v1\?"):
        make_model(RunConfig(file=file, base_url="http://localhost:8000/v1"), file.parent, environ={})


@pytest.mark.parametrize(
    ("environ", "name"), [(OPENAI, "gpt-6.1-sol"), (ANTHROPIC, "claude-opus-5-5")], ids=["openai", "anthropic"]
)
def test_every_provider_has_a_default_model(file: Path, environ: dict[str, str], name: str) -> None:
    assert make_model(RunConfig(file=file), file.parent, environ=environ).name == name


def test_a_model_made_from_a_configuration_asks_its_server(file: Path, conversation: Conversation) -> None:
    with ScriptedServer(Answer("from my own server")) as server:
        config = RunConfig(file=file, base_url=server.openai_url, model="my-model")
        reply = make_model(config, file.parent, environ={}).ask(conversation)
    assert reply.text == "from my own server"
    assert server.requests[0].path == "/v1/chat/completions"
    assert server.requests[0].body["model"] == "my-model"
    assert server.requests[0].headers["authorization"] == "Bearer unused"


def test_manual_and_replay_go_on_behind_what_was_answered(
    file: Path, tmp_path: Path, conversation: Conversation
) -> None:
    first, _ = record(tmp_path / "recorded", conversation, "first", "second")
    run = tmp_path / "run"
    Exchange(run).write_reply(1, first)
    (run / "replies" / "0002.md").write_text("written by hand")
    replay = RunConfig(file=file, replay=tmp_path / "recorded")
    manual = RunConfig(file=file, backend=Backend.MANUAL, wait=False)
    assert make_model(replay, run, environ={}).ask(conversation).text == "second"
    assert make_model(manual, run, environ={}).ask(conversation).text == "written by hand"


def test_importing_the_models_loads_no_sdk() -> None:
    # --help must answer at once; the SDKs take a second each.
    code = "import kernel_agent.models, sys; print({'openai', 'anthropic', 'httpx2', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
