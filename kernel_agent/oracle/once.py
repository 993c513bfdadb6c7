"""`Once`: what several threads ask for and one of them finds, while the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Found = TypeVar("Found")


class Once(Generic[Found]):
    """Answers by key. What could not be found is looked for again by whoever asks next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Future[Found]] = {}

    def of(self, key: str, find: Callable[[], Found]) -> Found:
        """The answer, by `find` if nobody has begun to find it. Raises what `find` raises, there as well as here."""
        with self._lock:
            known = self._answers.get(key)
            answer = self._answers[key] = known or Future()
        if known is not None:
            return known.result()
        try:
            answer.set_result(find())
        except BaseException as error:
            with self._lock:
                del self._answers[key]
            answer.set_exception(error)
            raise
        return answer.result()
