"""`require_sdk`: a provider's SDK that is not installed is told before a run begins, not when the first ask is sent."""

from __future__ import annotations

import importlib.util

from kernel_agent.config import Backend
from kernel_agent.models.errors import MissingSdk

SDKS = {Backend.OPENAI: ("openai",), Backend.ANTHROPIC: ("anthropic", "httpx2")}
"""What each backend imports when it is asked for the first time. Else `rag.embed_openai` alone imports one."""


def missing_modules(backend: Backend) -> list[str]:
    """What a backend needs and this environment lacks; nothing is imported."""
    return [name for name in SDKS.get(backend, ()) if importlib.util.find_spec(name) is None]


def require_sdk(backend: Backend) -> None:
    """Raises `MissingSdk`, with what to install, where a backend's SDK is not there."""
    missing = missing_modules(backend)
    if missing:
        raise MissingSdk(
            f"--backend {backend.value} needs {' and '.join(missing)}, which {_is(missing)} not installed",
            remedy=f"pip install {' '.join(missing)}; or use --backend manual or replay, which need neither",
        )


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
