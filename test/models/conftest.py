"""One conversation, and a model for every wire format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hosted_models import anthropic_model, openai_model
from scripted_server import ScriptedServer

from kernel_agent.models import Conversation, Model, Role, Turn
from kernel_agent.models.servers import Wire


def _over_responses(server: ScriptedServer, **options: object) -> Model:
    return openai_model(server, Wire.RESPONSES, **options)  # type: ignore[arg-type]


def _over_chat(server: ScriptedServer, **options: object) -> Model:
    return openai_model(server, Wire.CHAT_COMPLETIONS, **options)  # type: ignore[arg-type]


@pytest.fixture(params=[_over_responses, _over_chat, anthropic_model], ids=["responses", "chat", "anthropic"])
def build(request: pytest.FixtureRequest) -> Callable[..., Model]:
    """Makes a model that talks to a server, once per wire format."""
    make: Callable[..., Model] = request.param
    return make


@pytest.fixture
def conversation() -> Conversation:
    """A draft and a repair: four texts of which the first two are the stable prefix."""
    turns = (
        Turn(role=Role.USER, text="the forward and its pairs"),
        Turn(role=Role.ASSISTANT, text="a first draft"),
        Turn(role=Role.USER, text="the verdict"),
    )
    return Conversation(system="the contract", turns=turns)
