"""Keys of providers. The only place that reads them from the environment; they are never shown, logged or stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernel_agent.config import Backend
from kernel_agent.models.errors import MissingKey

KEY_VARIABLES = {Backend.OPENAI: "OPENAI_API_KEY", Backend.ANTHROPIC: "ANTHROPIC_API_KEY"}


@dataclass(frozen=True)
class Key:
    """A secret and the name of the variable it came from."""

    variable: str
    """What a person has to set."""
    secret: str = field(repr=False)
    """Sent to the provider and to nobody else."""
    given: bool = True
    """False: the variable is not set, and the secret is a word that stands for no key."""

    def redact(self, text: str) -> str:
        """The text without the secret: servers repeat keys in their error messages."""
        return text.replace(self.secret, f"[{self.variable}]") if self.given else text


def has_key(backend: Backend, environ: Mapping[str, str]) -> bool:
    """True when the variable of a provider is set and not blank."""
    return bool(environ.get(KEY_VARIABLES[backend], "").strip())


def find_key(backend: Backend, environ: Mapping[str, str], *, optional: bool = False) -> Key:
    """The key of a provider.

    `optional` is for servers of one's own, which mostly want none: they are sent the word `unused`, as the SDKs insist
    on something. Raises `MissingKey`, one line that names the variable.
    """
    variable = KEY_VARIABLES[backend]
    if has_key(backend, environ):
        return Key(variable, environ[variable].strip())
    if optional:
        return Key(variable, "unused", given=False)
    raise MissingKey(f"{variable} is not set: export it, or use --backend manual, which needs no key")
