"""Which model is asked when `--model` does not say. The one place to change when a provider brings a better one."""

from __future__ import annotations

from kernel_agent.config import Backend, Draft, RunConfig
from kernel_agent.errors import InputError
from kernel_agent.models.servers import is_official

DEFAULT_MODELS = {Backend.OPENAI: "gpt-6.1-sol", Backend.ANTHROPIC: "claude-opus-5-5"}

DEFAULT_DRAFT = Draft.COMPILER
"""What a model's first code starts from when `--draft` does not say (docs/architecture.md has the reason)."""


def model_name(backend: Backend, config: RunConfig) -> str:
    """The model's name. Raises `InputError` for another server than the provider's own, whose models we cannot know."""
    if config.model:
        return config.model
    if not is_official(backend, config.base_url):
        raise InputError(f"which model of {config.base_url}?", remedy="name it with --model")
    return DEFAULT_MODELS[backend]
