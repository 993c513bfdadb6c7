"""Models of the two hosted providers, talking to a scripted server."""

from __future__ import annotations

from scripted_server import ScriptedServer

from kernel_agent.config import Effort
from kernel_agent.models.anthropic import AnthropicModel
from kernel_agent.models.keys import Key
from kernel_agent.models.openai import OpenAIModel
from kernel_agent.models.protocol import OnNotice, unheard
from kernel_agent.models.servers import Wire

SECRET = "sk-ant-api03-do-not-tell"


def openai_model(
    server: ScriptedServer,
    wire: Wire,
    name: str = "gpt-6-sol",
    effort: Effort = Effort.MEDIUM,
    on_notice: OnNotice = unheard,
) -> OpenAIModel:
    """A model of OpenAI's class behind the server."""
    key = Key("OPENAI_API_KEY", SECRET)
    return OpenAIModel(name, key, effort=effort, base_url=server.openai_url, wire=wire, on_notice=on_notice)


def anthropic_model(
    server: ScriptedServer, name: str = "claude-opus-5-5", effort: Effort = Effort.MEDIUM, on_notice: OnNotice = unheard
) -> AnthropicModel:
    """A model of Anthropic's class behind the server."""
    return AnthropicModel(
        name, Key("ANTHROPIC_API_KEY", SECRET), effort=effort, base_url=server.url, on_notice=on_notice
    )
