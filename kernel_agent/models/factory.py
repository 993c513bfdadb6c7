"""`make_model`: the model that a configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kernel_agent.config import Backend, RunConfig
from kernel_agent.models.anthropic import AnthropicModel
from kernel_agent.models.choice import choose_backend
from kernel_agent.models.compiler import CompilerModel
from kernel_agent.models.defaults import model_name
from kernel_agent.models.keys import find_key
from kernel_agent.models.manual import ManualModel
from kernel_agent.models.openai import OpenAIModel
from kernel_agent.models.protocol import Model, OnNotice, unheard
from kernel_agent.models.replay import ReplayModel
from kernel_agent.models.sdk import require_sdk
from kernel_agent.models.servers import is_official


def make_model(
    config: RunConfig,
    run_dir: Path,
    *,
    on_notice: OnNotice = unheard,
    environ: Mapping[str, str] | None = None,
) -> Model:
    """The model of a run.

    `manual`, `replay` and `compiler` go on behind the replies that `run_dir` holds already. `on_notice` hears remarks
    as they arise. `environ` holds the keys; None: the process's own environment.
    Raises `MissingKey`, `MissingSdk`, `BadRecording`, `InputError` (a server without `--model`).
    """
    environ = os.environ if environ is None else environ
    choice = choose_backend(config, environ)
    if choice.backend is Backend.COMPILER:
        return CompilerModel(config.file, run_dir, on_notice=on_notice)
    if choice.backend is Backend.MANUAL:
        name = config.model or "manual"
        return ManualModel(run_dir, name=name, wait=config.wait, on_notice=on_notice)
    if choice.replay is not None:
        return ReplayModel(choice.replay, run_dir, on_notice=on_notice)
    key = find_key(choice.backend, environ, optional=not is_official(choice.backend, config.base_url))
    require_sdk(choice.backend)
    name = model_name(choice.backend, config)
    make = AnthropicModel if choice.backend is Backend.ANTHROPIC else OpenAIModel
    return make(name, key, effort=config.effort, base_url=config.base_url, on_notice=on_notice)
