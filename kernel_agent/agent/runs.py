"""Starting a run, going on with one, and looking at what runs there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kernel_agent.agent import events as ev
from kernel_agent.agent import prompts
from kernel_agent.agent.asks import input_tokens
from kernel_agent.agent.brief import Brief, make_brief
from kernel_agent.agent.budget import EXPECTED_OUTPUT, Budget
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.device import require_device
from kernel_agent.agent.ledger import Ledger, read_ledger
from kernel_agent.agent.observer import Observer, Unwatched
from kernel_agent.agent.orchestrator import FinishedRun, described, run_to_end
from kernel_agent.agent.recorded import as_recorded
from kernel_agent.agent.runfolder import RunFolder
from kernel_agent.agent.snapshots import render
from kernel_agent.agent.state import RunState, fold
from kernel_agent.agent.tools import DerivedDraft, Tools
from kernel_agent.agent.workshop import open_tools
from kernel_agent.config import Backend, Draft, RunConfig
from kernel_agent.errors import InputError, InternalError, InterruptedRun, KernelAgentError, file_problem
from kernel_agent.machine import this_machine
from kernel_agent.models.choice import BackendChoice, choose_backend
from kernel_agent.models.defaults import DEFAULT_DRAFT, model_name
from kernel_agent.models.factory import make_model
from kernel_agent.models.keys import KEY_VARIABLES
from kernel_agent.models.protocol import Conversation, Model, OnNotice, Usage
from kernel_agent.pairs.userfile import read_file
from kernel_agent.report.trace import render_trace

OpenTools = Callable[[RunConfig, Path | None], AbstractContextManager[Tools]]
"""`kernel_agent.agent.workshop.open_tools`, or what a test has in its place."""


class MakeModel(Protocol):
    """`kernel_agent.models.make_model`, or what a test has in its place."""

    def __call__(self, config: RunConfig, run_dir: Path, /, *, on_notice: OnNotice) -> Model:
        """The model of a run; it goes on behind the replies that the folder holds."""
        ...


@dataclass(frozen=True)
class Changes:
    """What may differ when a run goes on; None keeps what was."""

    max_iters: int | None = None
    max_tokens: int | None = None
    max_cost_usd: float | None = None
    tune_variants: int | None = None
    wait: bool | None = None
    device: str | None = None
    replay: Path | None = None
    """Where the recorded run lies now, if it was moved."""

    def apply(self, config: RunConfig) -> RunConfig:
        """The configuration with the changes in it."""
        changed = {name: value for name, value in vars(self).items() if value is not None}
        return RunConfig.model_validate({**config.model_dump(), **changed})


@dataclass(frozen=True)
class FirstPrompt:
    """What a run would send first."""

    choice: BackendChoice
    """Without a key and without `--backend`: the hosted backend that is the default, so that there is a price."""
    model: str
    conversation: Conversation
    input_tokens: int
    """Estimated."""
    output_tokens: int
    """Assumed."""
    cost_usd: float | None
    """Estimated for this one ask; None when the model's price is unknown, and where nobody is paid."""
    notices: tuple[str, ...] = ()
    """What the search for similar pairs has to say, a line each."""

    @property
    def hosted(self) -> bool:
        """True when asking costs money."""
        return self.choice.backend in KEY_VARIABLES


def run(
    config: RunConfig,
    observer: Observer | None = None,
    *,
    tools: OpenTools = open_tools,
    model: MakeModel = make_model,
) -> FinishedRun:
    """Start a run and bring it to its end.

    Raises `InputError` (the file is wrong, a limit cannot be kept; no run folder is left), `EnvironmentProblem`,
    `ModelError`, `WaitingForReply`, `InterruptedRun` and what else the rooms raise; once the folder exists, the error
    names it (`KernelAgentError.run`) and the run can be resumed.
    """
    observer = observer or Unwatched()
    facts = read_file(config.file)
    require_device(config.device)
    choice = choose_backend(config, os.environ)
    config = _chosen(config, choice)
    folder = RunFolder.plan(config.out, facts.stem, facts.hash8)
    source = model(config, folder.path, on_notice=observer.on_notice)
    Budget.of(config, source.name)
    machine = this_machine(config.device)
    with tools(config, folder.cache) as opened:
        spec = opened.describe(facts)
        folder.create(facts.source)
        with Ledger.create(folder.ledger) as ledger:
            started = ev.RunStarted(
                run_id=folder.run_id,
                config=_stored(config, folder),
                backend=choice.backend,
                backend_why=choice.why,
                model=source.name,
                versions=machine.versions,
                gpu=machine.gpu,
                stem=facts.stem,
                hash8=facts.hash8,
            )
            return _drive(Desk(folder, ledger, opened, source, observer), started, described(spec))


def resume(
    path: Path,
    observer: Observer | None = None,
    changes: Changes | None = None,
    *,
    tools: OpenTools = open_tools,
    model: MakeModel = make_model,
) -> FinishedRun:
    """Go on with a run wherever its ledger ends. A finished run is returned as it is, unless its budget is changed.

    Raises `InputError` when there is no run, `LedgerBusy` when another process works on it, and what `run` raises.
    """
    observer = observer or Unwatched()
    changes = changes or Changes()
    folder = RunFolder.open(path)
    with Ledger.open(folder.ledger) as ledger:
        state = fold(ledger)
        stored = _started_config(state, folder)
        resumed = ev.Resumed(config=_stored(changes.apply(_located(stored, folder)), folder), dropped=ledger.dropped)
        if state.finished is not None and fold([ev.Entry(number=1, at="", event=resumed)], state).finished is not None:
            _write_trace(folder, ledger)  # it may have been killed between its last event and this
            return FinishedRun(folder, state)
        config = _located(resumed.config, folder)
        require_device(config.device)
        resumed = resumed.model_copy(update={"machine": this_machine(config.device)})
        source = model(config, folder.path, on_notice=observer.on_notice)
        Budget.of(config, source.name)
        with tools(config, folder.cache) as opened:
            return _drive(Desk(folder, ledger, opened, source, observer), resumed)


def first_prompt(config: RunConfig, *, tools: OpenTools = open_tools) -> FirstPrompt:
    """What `run` would ask first, with its estimated size and cost. Asks nothing, writes nothing, needs no key."""
    facts = read_file(config.file)
    require_device(config.device)
    choice = _choice_with_price(config)
    config = _chosen(config, choice)
    hosted = choice.backend in KEY_VARIABLES
    name = model_name(choice.backend, config) if hosted else config.model or choice.backend.value
    price = Budget.of(config, name).price if hosted else None
    with tools(config, None) as opened:
        spec = opened.describe(facts)
        found = opened.retrieve(spec)
        analysed = None if opened.analyse is None else opened.analyse(spec)
        derived = None
        if opened.derive is not None and config.draft not in (None, Draft.NONE):
            derived = opened.derive(spec, config.draft is Draft.COMPILER, Unwatched().on_case)
    pairs = tuple(pair for pair in found.pairs if pair.chosen)
    brief = make_brief(
        spec,
        pairs,
        freeze_forward=config.freeze_forward,
        max_asks=config.max_iters,
        facts=analysed,
        derived=None if derived is None else derived.event,
    )
    conversation = _first(brief, derived, config).conversation
    tokens = input_tokens(conversation)
    cost = None if price is None else price.cost(Usage(input=tokens, output=EXPECTED_OUTPUT))
    unmatched = tuple(f"no pair matches the excluded term {term!r}" for term in found.unmatched_excludes)
    notices = (*unmatched, *found.notice.splitlines())
    return FirstPrompt(choice, name, conversation, tokens, EXPECTED_OUTPUT, cost, notices)


def _first(brief: Brief, derived: DerivedDraft | None, config: RunConfig) -> prompts.Prompt:
    if derived is not None and derived.candidate is not None:
        code = render(derived.candidate)
        return prompts.beat(brief, code, derived.event, None, config.min_rel_impr, config.max_iters)
    if config.reflect and config.max_iters > 1:
        return prompts.plan(brief)
    return prompts.draft(brief)


def _chosen(config: RunConfig, choice: BackendChoice) -> RunConfig:
    """The configuration with its source of backwards; a replay takes its steps as the recorded run did."""
    if choice.replay is not None:
        config = as_recorded(config, choice.replay)
    if choice.backend is Backend.COMPILER:  # it plans by itself, and has one best draft
        config = config.model_copy(update={"reflect": False, "candidates": 1, "draft": Draft.COMPILER})
    elif config.draft is None and choice.replay is None:
        config = config.model_copy(update={"draft": DEFAULT_DRAFT})
    return config.model_copy(update={"backend": choice.backend, "replay": choice.replay or config.replay})


def _choice_with_price(config: RunConfig) -> BackendChoice:
    """Who would be asked; where no key is set and nobody was named, the hosted backend that is the default."""
    if config.backend is not None or config.replay is not None:
        return choose_backend(config, os.environ)
    choice = choose_backend(config, os.environ)
    if choice.backend in KEY_VARIABLES:
        return choice
    why = f"it is the default; no key is set, and a run would use {choice.backend.value} instead"
    return BackendChoice(next(iter(KEY_VARIABLES)), why)


def list_runs(out: Path) -> tuple[FinishedRun, ...]:
    """The runs below a folder, newest first. `state.finished` is None for those that can be resumed."""
    ledgers = [path for path in out.glob("*/runs/*/trace.jsonl") if not path.parent.is_symlink()]
    newest_first = sorted(ledgers, key=lambda path: path.parent.name, reverse=True)
    return tuple(FinishedRun(RunFolder(path.parent), fold(read_ledger(path).entries)) for path in newest_first)


def read_run(path: Path) -> FinishedRun:
    """A run as it stands on disk. Raises `InputError` when there is none."""
    folder = RunFolder.open(path)
    return FinishedRun(folder, fold(read_ledger(folder.ledger).entries))


def _drive(desk: Desk, *first: ev.Event) -> FinishedRun:
    """Record the first events and run to the end; whatever stops it is in the ledger and in `trace.md` when raised."""
    folder = desk.folder
    try:
        for event in first:
            desk.record(event)
        return run_to_end(desk)
    except KeyboardInterrupt as stop:
        desk.record(ev.Interrupted(line=str(stop) or "stopped from the keyboard"))
        raise _of_run(
            InterruptedRun("the run was stopped", remedy=f"go on with it: {folder.resume_command}"), folder
        ) from None
    except KernelAgentError as error:
        desk.record(ev.Interrupted(line=error.message))
        error.run = folder.path
        raise
    except OSError as error:
        problem = file_problem(error)
        desk.record(ev.Interrupted(line=error.strerror or str(error)))
        raise _of_run(problem, folder) from error
    except Exception as error:
        desk.record(ev.Interrupted(line=f"internal error: {type(error).__name__}"))
        raise _of_run(InternalError.of(error), folder) from error
    finally:
        _write_trace(folder, desk.ledger)


def _of_run(error: KernelAgentError, folder: RunFolder) -> KernelAgentError:
    error.run = folder.path
    return error


def _write_trace(folder: RunFolder, ledger: Ledger) -> None:
    folder.trace.write_text(render_trace(ledger), encoding="utf-8")


def _stored(config: RunConfig, folder: RunFolder) -> RunConfig:
    """A configuration whose paths are relative to the run folder, so that the folder can be moved."""
    paths = {
        name: None if path is None else Path(os.path.relpath(path, folder.path))
        for name, path in (("replay", config.replay), ("rag_index", config.rag_index))
    }
    return config.model_copy(update={"file": Path(folder.source.name), "out": Path("../../.."), **paths})


def _located(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Inverse of `_stored`."""
    paths = {
        name: None if path is None else Path(os.path.normpath(folder.path / path))
        for name, path in (("replay", config.replay), ("rag_index", config.rag_index))
    }
    return config.model_copy(update={"file": folder.source, "out": folder.product.parent, **paths})


def _started_config(state: RunState, folder: RunFolder) -> RunConfig:
    if state.config is None:
        raise InputError("the ledger holds no event yet", remedy="start a new run", path=folder.ledger)
    return state.config
