"""Why no reply can be had, one type per thing a caller or a person can do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_agent.errors import ExitCode, KernelAgentError

if TYPE_CHECKING:
    from kernel_agent.models.keys import Key


class ModelError(KernelAgentError):
    """A model did not answer."""

    exit_code = ExitCode.ENVIRONMENT


class MissingKey(ModelError):
    """The variable that holds a provider's key is not set."""


class MissingSdk(ModelError):
    """The package through which a provider is asked is not installed."""


class KeyRejected(ModelError):
    """The provider does not accept the key, or the key may not use this model."""


class WrongProtocol(ModelError):
    """Something answers at this address, but no model: a web page, a proxy's log-in."""


class RequestRejected(ModelError):
    """The server understood the request and will never accept it: a wrong model name, a prompt that is too long."""

    def __init__(self, message: str, *, status: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class ProviderUnavailable(ModelError):
    """The server is out of reach, overloaded or broken, and stayed so through all retries."""


class CutStream(ModelError):
    """A reply broke off before its end, twice in a row."""


class RefusedReply(ModelError):
    """The provider's policy stopped the request before the model began to answer.

    A model that declines in words is no error but a reply with `StopReason.REFUSAL`.
    """


class BadRecording(ModelError):
    """The folder that should be replayed holds no run, or a damaged one."""

    exit_code = ExitCode.BAD_INPUT


class ReplayExhausted(ModelError):
    """The run asks more often than the recorded one did."""


def is_policy(code: str) -> bool:
    """True when OpenAI's error code means that the content was refused, not that the service failed."""
    return code == "invalid_prompt" or "policy" in code


def said(body: object) -> str:
    """What the JSON body of an error says, as providers wrap it: `{"error": {"message": ...}}` or less."""
    while isinstance(body, dict):
        body = body.get("error") or body.get("message") or body.get("detail") or "nothing more"
    return str(body or "nothing more")


def require_stream(content_type: str, *, server: str) -> None:
    """Accept what a streamed reply is sent as. Raises `WrongProtocol` for a web page, which holds no event at all."""
    if content_type.partition(";")[0].strip().lower() in {"text/html", "application/xhtml+xml"}:
        raise WrongProtocol(
            f"{server} does not speak the protocol: it answered with a web page",
            remedy="check --base-url; most servers want /v1 at its end",
        )


def status_error(status: int, message: str, *, server: str, key: Key) -> ModelError:
    """The error that an HTTP status means. `message` is the server's own, without any key in it."""
    variable = key.variable
    if status in {401, 403} and not key.given:
        return KeyRejected(
            f"{server} wants a key ({status}), and {variable} is not set",
            remedy=f"set {variable} to a key of this server",
        )
    if status in {401, 403}:
        return KeyRejected(
            f"{server} does not accept the key in {variable} ({status})",
            remedy="check the key, and that it may use this model",
        )
    if status == 429 or status >= 500:
        return ProviderUnavailable(f"{server} did not answer ({status}): {message}", remedy="try again later")
    return RequestRejected(
        f"{server} rejected the request ({status}): {message}",
        status=status,
        remedy="check --model and --base-url; for a prompt that is too long, lower --topk",
    )
