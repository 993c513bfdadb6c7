"""Sources of replies behind one protocol: `openai`, `anthropic`, `manual` and `replay`, one file each.

Importing this package imports no SDK; a provider's SDK is loaded when it is asked for the first time.
"""

from kernel_agent.models.choice import BackendChoice, choose_backend
from kernel_agent.models.errors import ModelError
from kernel_agent.models.exchange import Exchange
from kernel_agent.models.factory import make_model
from kernel_agent.models.prices import cost_of, price_of
from kernel_agent.models.protocol import Conversation, Model, Notice, NoticeKind, Reply, Role, StopReason, Turn, Usage
from kernel_agent.models.tokens import estimate_tokens

__all__ = [
    "BackendChoice",
    "Conversation",
    "Exchange",
    "Model",
    "ModelError",
    "Notice",
    "NoticeKind",
    "Reply",
    "Role",
    "StopReason",
    "Turn",
    "Usage",
    "choose_backend",
    "cost_of",
    "estimate_tokens",
    "make_model",
    "price_of",
]
