"""`choose_backend`: who writes the backward, and why. A run's first line quotes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.config import Backend, RunConfig
from kernel_agent.data import logs_root
from kernel_agent.errors import InputError
from kernel_agent.models.errors import BadRecording
from kernel_agent.models.keys import KEY_VARIABLES, has_key
from kernel_agent.models.replay import find_recording


@dataclass(frozen=True)
class BackendChoice:
    """A source of backwards."""

    backend: Backend
    why: str
    """One line."""
    replay: Path | None = None
    """The recorded run, for `Backend.REPLAY`."""


def choose_backend(config: RunConfig, environ: Mapping[str, str], *, recordings: Path | None = None) -> BackendChoice:
    """What `--backend` says, else what is at hand: a key, a server, the compiler.

    `recordings`: folder of recorded runs for `--backend replay`; None: those shipped with the tool. Raises
    `BadRecording` (`--backend replay` without a run to replay), `InputError` (the file cannot be read).
    """
    if config.backend is Backend.REPLAY or (config.backend is None and config.replay is not None):
        return _replay(config, recordings)
    if config.backend is not None:
        return BackendChoice(config.backend, "chosen with --backend")
    for backend, variable in KEY_VARIABLES.items():
        if has_key(backend, environ):
            return BackendChoice(backend, f"{variable} is set")
    if config.base_url is not None:
        return BackendChoice(Backend.OPENAI, f"--base-url names a server and no key is set: {config.base_url}")
    return BackendChoice(Backend.COMPILER, "no key is set; the compiler needs none")


def _replay(config: RunConfig, recordings: Path | None) -> BackendChoice:
    if config.replay is not None:
        return BackendChoice(Backend.REPLAY, f"replays {config.replay.name}", config.replay)
    run = find_recording(_source(config.file), recordings or logs_root())
    if run is None:
        raise BadRecording("no shipped run is of this forward", remedy="name the folder of a recorded run to replay")
    return BackendChoice(Backend.REPLAY, f"chosen with --backend; {run.name} is a recorded run of this forward", run)


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read this file: {error}", path=path) from error
