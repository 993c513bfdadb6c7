"""`Tries`: what passes made of one adjoint: a schedule also makes those behind it, so each is wanted several times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kernel_agent.compiler.errors import CannotDerive

Made = TypeVar("Made")
Defect = Callable[[str, Exception], None]
"""Is told what failed, and how, where a pass has a defect."""


@dataclass(frozen=True)
class Try:
    """One that came to an end."""

    made: Any
    """None where a pass refused."""
    refused: str = ""
    """Why."""


class Tries:
    """Of one launch and one adjoint. What is made must not be changed any more."""

    def __init__(self) -> None:
        self._ended: dict[str, Try] = {}

    def once(
        self,
        name: str,
        make: Callable[[], Made | None],
        defect: Defect | None,
        refused: dict[str, None] | None = None,
        key: str = "",
    ) -> Made | None:
        """What `tried` gives, made when it is first asked for by `key`, or by its name. A defect is told of each time,
        since the pass is tried again."""
        key = key or name
        if key not in self._ended:
            why: dict[str, None] = {}
            failed: list[Exception] = []

            def told(_: str, error: Exception) -> None:
                failed.append(error)

            made = tried(name, make, told, why)
            if failed:
                if defect is None:
                    raise failed[0]
                defect(name, failed[0])
                return None
            self._ended[key] = Try(made, "".join(why))
        ended = self._ended[key]
        if refused is not None and ended.refused:
            refused[ended.refused] = None
        found: Made | None = ended.made
        return found


def tried(
    name: str, make: Callable[[], Made | None], defect: Defect | None, refused: dict[str, None] | None = None
) -> Made | None:
    """What a pass makes; None where it refuses, since those behind it do not need what it could not do. `refused` is
    told why."""
    try:
        return make()
    except CannotDerive as reason:
        if refused is not None:
            refused[f"`{name}` is not had: {reason.message}"] = None
        return None
    except Exception as error:
        if defect is None:
            raise
        defect(name, error)
        return None
