"""The root command `kernel-agent` and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from kernel_agent import __version__
from kernel_agent.cli.bench import bench
from kernel_agent.cli.check import check
from kernel_agent.cli.cost import cost
from kernel_agent.cli.dataset import dataset
from kernel_agent.cli.derive import derive
from kernel_agent.cli.doctor import doctor
from kernel_agent.cli.explain import explain
from kernel_agent.cli.grad import grad
from kernel_agent.cli.new import new
from kernel_agent.cli.parcel import pack, unpack
from kernel_agent.cli.rag import rag
from kernel_agent.cli.recheck import recheck
from kernel_agent.cli.runs import resume, runs, trace
from kernel_agent.cli.sanitize import sanitize
from kernel_agent.cli.stopped import show_stop
from kernel_agent.errors import (
    EnvironmentProblem,
    ExitCode,
    InputError,
    InternalError,
    InterruptedRun,
    KernelAgentError,
    file_problem,
)

# Typer has carried its own click since 0.2x, older ones use the package: either way this is the base of usage errors.
UsageProblem: type[BaseException] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="kernel-agent",
    help="A Triton forward kernel goes in, a proven Triton backward comes out.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    check,
    recheck,
    bench,
    sanitize,
    cost,
    explain,
    derive,
    grad,
    resume,
    runs,
    trace,
    pack,
    unpack,
    doctor,
    new,
):
    app.command()(command)
app.add_typer(dataset)
app.add_typer(rag)

MAIN_JOB = "Main job"
SOURCE = "Source of backwards"
RETRIEVAL = "Retrieval"
SEARCH = "Search"
BUDGET = "Budget"
OUTPUT = "Output"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kernel-agent {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    file_path: Annotated[
        Path | None,
        typer.Option(help="File with the forward kernel; its stub carries @autodiff.", rich_help_panel=MAIN_JOB),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=MAIN_JOB)] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of inputs and cotangents.", rich_help_panel=MAIN_JOB)] = 0,
    freeze_forward: Annotated[
        bool,
        typer.Option(
            "--freeze-forward", help="Refuse backwards that bring their own forward.", rich_help_panel=MAIN_JOB
        ),
    ] = False,
    mutant_seconds: Annotated[
        float,
        typer.Option(help="For wrong backwards, which the gate must refuse; 0: try none.", rich_help_panel=MAIN_JOB),
    ] = 5.0,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Refuse gradients whose bits may differ from call to call.",
            rich_help_panel=MAIN_JOB,
        ),
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option(
            help="openai, anthropic, manual, replay or compiler. Default: by the keys present, else offline.",
            rich_help_panel=SOURCE,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; beats --openai-model.", rich_help_panel=SOURCE)] = None,
    openai_model: Annotated[
        str | None, typer.Option(help="Model name for the openai backend.", rich_help_panel=SOURCE)
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="A server that speaks the backend's protocol (vLLM, Ollama, ...).", rich_help_panel=SOURCE),
    ] = None,
    reasoning_effort: Annotated[
        str, typer.Option(help="minimal, low, medium or high.", rich_help_panel=SOURCE)
    ] = "medium",
    replay: Annotated[
        Path | None, typer.Option(help="Recorded run whose replies to replay.", rich_help_panel=SOURCE)
    ] = None,
    topk: Annotated[int, typer.Option(help="Retrieved pairs shown to the model.", rich_help_panel=RETRIEVAL)] = 4,
    min_sim: Annotated[
        float | None,
        typer.Option(help="Least descriptor cosine, 0 to 1. Default: calibrated.", rich_help_panel=RETRIEVAL),
    ] = None,
    rag_exclude: Annotated[
        str,
        typer.Option(help="Comma-separated terms; pairs whose path holds one are left out.", rich_help_panel=RETRIEVAL),
    ] = "",
    rag_index: Annotated[
        Path | None,
        typer.Option(
            help="Folder of own pairs (dataset harvest --index) or of one index (rag build).", rich_help_panel=RETRIEVAL
        ),
    ] = None,
    rag_unlicensed: Annotated[
        bool,
        typer.Option(
            "--rag-unlicensed", help="Show harvested pairs without a licence, too.", rich_help_panel=RETRIEVAL
        ),
    ] = False,
    no_rag: Annotated[bool, typer.Option("--no-rag", help="Show no pairs.", rich_help_panel=RETRIEVAL)] = False,
    draft: Annotated[
        str | None,
        typer.Option(
            help="What a model starts from: compiler (the derived backward, to beat), rag (a pair), none.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(help="First drafts asked for at once, each after another pair.", rich_help_panel=SEARCH),
    ] = 1,
    reflect: Annotated[
        bool,
        typer.Option(
            "--reflect/--no-reflect",
            help="Ask for a plan first, which is checked, priced and used to search for pairs by technique.",
            rich_help_panel=SEARCH,
        ),
    ] = True,
    diagnosis: Annotated[
        bool,
        typer.Option(
            "--diagnosis/--no-diagnosis",
            help="Tell the model where and in what a red backward is wrong, not just by how much.",
            rich_help_panel=SEARCH,
        ),
    ] = True,
    tune_variants: Annotated[
        int,
        typer.Option(help="Launch parameters tried before optimising asks; 0: none.", rich_help_panel=SEARCH),
    ] = 24,
    tune_seconds: Annotated[
        float,
        typer.Option(
            help="On a GPU, with --backend compiler: for tiles, warps and stages and their proofs; 0: none.",
            rich_help_panel=SEARCH,
        ),
    ] = 150.0,
    max_iters: Annotated[int, typer.Option(help="Asks over all phases.", rich_help_panel=BUDGET)] = 10,
    patience: Annotated[
        int, typer.Option(help="Asks without progress before rolling back to the best.", rich_help_panel=BUDGET)
    ] = 3,
    min_rel_impr: Annotated[
        float, typer.Option(help="Relative speed-up that an optimised backward must show.", rich_help_panel=BUDGET)
    ] = 0.02,
    max_cost_usd: Annotated[float | None, typer.Option(help="Stop before this cost.", rich_help_panel=BUDGET)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop before this many tokens.", rich_help_panel=BUDGET)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for delivered files and runs.", rich_help_panel=OUTPUT)] = Path(
        "generated"
    ),
    no_wait: Annotated[
        bool,
        typer.Option("--no-wait", help="manual: exit with 4 instead of waiting for a reply.", rich_help_panel=OUTPUT),
    ] = False,
    pause: Annotated[
        bool,
        typer.Option(
            "--pause", help="Exit with 4 when the backward is proven; resume goes on.", rich_help_panel=OUTPUT
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the first prompt and its estimated cost, ask nothing.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one final record instead of the trace.", rich_help_panel=OUTPUT)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show streamed text and every case.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=OUTPUT)
    ] = False,
    version: Annotated[  # noqa: ARG001 - the callback does it
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Derive and prove the backward of a Triton forward.

    [bold]kernel-agent --file-path examples/layernorm.py --topk 4[/]
    """
    if context.invoked_subcommand is not None:
        if file_path is not None:
            raise InputError(
                f"--file-path starts the main job and cannot go with the command {context.invoked_subcommand!r}",
                remedy="leave one of them out",
            )
        return
    if file_path is None:
        given = [name for name in context.params if _given(context, name)]
        if given:
            raise InputError(
                "--file-path is missing",
                remedy="kernel-agent --file-path FILE.py; kernel-agent --help lists all options",
            )
        print(context.get_help())
        raise typer.Exit
    from kernel_agent.cli.options import make_config

    decisive = {
        "draft": draft,
        "candidates": candidates,
        "reflect": reflect,
        "tune_variants": tune_variants,
        "max_iters": max_iters,
        "patience": patience,
        "min_rel_impr": min_rel_impr,
    }
    config = make_config(
        **{name: value for name, value in decisive.items() if _given(context, name)},  # a replay knows the others
        tune_seconds=tune_seconds,
        diagnosis=diagnosis,
        file=file_path,
        device=device,
        seed=seed,
        freeze_forward=freeze_forward,
        mutant_seconds=mutant_seconds,
        deterministic=deterministic,
        backend=backend,
        model=model or openai_model,
        base_url=base_url,
        effort=reasoning_effort,
        replay=replay,
        topk=topk,
        min_sim=min_sim,
        rag_exclude=tuple(term.strip() for term in rag_exclude.split(",") if term.strip()),
        rag_index=rag_index,
        rag_unlicensed=rag_unlicensed,
        rag=not no_rag,
        max_cost_usd=max_cost_usd,
        max_tokens=max_tokens,
        out=out,
        pause=pause,
        wait=not no_wait,
    )
    _read_first(config.file)
    from kernel_agent.cli import job

    if dry_run:
        job.dry_run(config)
    else:
        job.start(config, job.View(as_json=as_json, verbose=verbose, quiet=quiet))


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read_first(file: Path) -> None:
    """Complain of the file at once, before the seconds that it takes to load torch."""
    from kernel_agent.pairs.userfile import read_file

    read_file(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: ends the process with one of `ExitCode`."""
    sys.exit(int(run(arguments)))


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, as schedulers and `timeout` send it, ends a run as Ctrl-C does: children ended, ledger resumable."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - a handler's arguments
        raise KeyboardInterrupt("ended by SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; every failure has been shown."""
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except BrokenPipeError:  # whoever read stdout has gone, such as `head`; Python flushes it once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.ENVIRONMENT)


def _run(words: list[str]) -> int:
    as_json, verbose = "--json" in words, not {"-v", "--verbose"}.isdisjoint(words)
    try:
        if sys.platform != "linux":
            raise EnvironmentProblem(
                f"kernel-agent runs on Linux; this is {sys.platform} (use a Linux machine, a container or WSL)"
            )
        with _terminated_as_interrupted():
            result = app(args=words, standalone_mode=False)
    except KernelAgentError as error:
        return show_stop(error, as_json=as_json, verbose=verbose)
    except typer.Exit as stop:
        return stop.exit_code
    except UsageProblem as error:
        if as_json:
            return show_stop(InputError(error.format_message(), remedy="kernel-agent --help"), as_json=True)  # type: ignore[attr-defined]
        error.show()  # type: ignore[attr-defined]
        return int(ExitCode.BAD_INPUT)
    except BrokenPipeError:
        raise
    except OSError as error:
        return show_stop(file_problem(error), as_json=as_json)
    except (typer.Abort, KeyboardInterrupt):
        return show_stop(InterruptedRun("interrupted"), as_json=as_json)
    except Exception as error:  # the last resort: a defect of ours, shown as one line
        unexpected = InternalError.of(error)
        unexpected.__cause__ = error
        return show_stop(unexpected, as_json=as_json, verbose=verbose)
    return result if isinstance(result, int) else int(ExitCode.OK)
