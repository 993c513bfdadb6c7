"""Attributes that answer differently on some threads, for as long as one of them needs it.

Code under test asks modules that all threads share: `torch.cuda`, Triton, `torch.autograd.Function`. So an attribute is
never simply replaced. A dispatcher takes its place, which asks on whose behalf it is called: on a thread that is inside
of the scene it gives the stand-in's answer, on any other thread the original one. The first thread that enters puts
the dispatchers in place, the last one that leaves takes them away.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Actor = TypeVar("Actor")

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One attribute and what it answers inside of a scene."""

    owner: Any
    """Module, class or object that holds the attribute."""
    name: str
    answer: Any
    """Called instead of the original, or, for an object that is not called, used instead of it."""
    elsewhere: Any = _MISSING
    """What other threads meet meanwhile; by default the original."""


@dataclass(frozen=True)
class CodePatch:
    """One function whose code is exchanged, since others may have bound the function itself."""

    function: types.FunctionType
    code: types.CodeType
    """Code with as many free variables as the function has; it dispatches by thread on its own."""


class _Members(threading.local):
    """The scenes that the current thread is in, innermost last."""

    def __init__(self) -> None:
        self.actors: list[Any] = []


class Scene(Generic[Actor]):
    """A set of patches in force on the threads that entered it, each with an actor of its own."""

    def __init__(self, patches: Callable[[], Sequence[Patch | CodePatch]]) -> None:
        self._patches = patches
        self._lock = threading.RLock()
        self._entered = 0
        self._undo: list[Callable[[], None]] = []
        self._members = _Members()

    @property
    def actor(self) -> Actor | None:
        """What the current thread entered the scene with last; None outside."""
        return self._members.actors[-1] if self._members.actors else None

    @contextlib.contextmanager
    def entered(self, actor: Actor) -> Iterator[None]:
        """The patches answer on this thread while the block runs. May be nested."""
        with self._lock:
            if self._entered == 0:
                self._put_in_place()
            self._entered += 1
        self._members.actors.append(actor)
        try:
            yield
        finally:
            self._members.actors.pop()
            with self._lock:
                self._entered -= 1
                if self._entered == 0:
                    self._take_away()

    def _put_in_place(self) -> None:
        try:
            for patch in self._patches():
                self._undo.append(_exchange(patch) if isinstance(patch, CodePatch) else self._replace(patch))
        except BaseException:
            self._take_away()
            raise

    def _take_away(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, patch: Patch) -> Callable[[], None]:
        owner, name = patch.owner, patch.name
        original = vars(owner).get(name, _MISSING)
        elsewhere = original if patch.elsewhere is _MISSING else patch.elsewhere
        dispatcher = self._dispatcher(elsewhere, patch.answer)
        setattr(owner, name, dispatcher)

        def undo() -> None:
            if vars(owner).get(name) is not dispatcher:
                return  # someone replaced it meanwhile; the dispatcher beneath answers as the original did
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

        return undo

    def _dispatcher(self, original: Any, answer: Any) -> Any:
        if not isinstance(original, types.FunctionType):
            return ByThread(self, original, answer)

        @functools.wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return (original if self.actor is None else answer)(*args, **kwargs)

        return dispatch


class ByThread:
    """Stands for a class, a builtin or an object: outside of the scene it is the original in all but identity."""

    def __init__(self, scene: Scene[Any], original: Any, answer: Any) -> None:
        self.__dict__.update(_scene=scene, _original=original, _answer=answer)

    def _chosen(self) -> Any:
        chosen = self._original if self._scene.actor is None else self._answer
        if chosen is _MISSING:
            raise AttributeError("this exists on a machine with a GPU only")
        return chosen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call, or make an instance."""
        return self._chosen()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original or of the answer."""
        return getattr(self._chosen(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the original or on the answer."""
        setattr(self._chosen(), name, value)

    def __instancecheck__(self, instance: object) -> bool:
        """Instances of either are instances."""
        return any(isinstance(instance, kind) for kind in (self._original, self._answer) if isinstance(kind, type))

    def __subclasscheck__(self, subclass: type) -> bool:
        """As `__instancecheck__`."""
        return any(issubclass(subclass, kind) for kind in (self._original, self._answer) if isinstance(kind, type))

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """A class that is derived inside of the scene is derived from the original."""
        return (self._original,)

    def __or__(self, other: Any) -> Any:
        """In annotations it is the original."""
        return self._original | other

    def __ror__(self, other: Any) -> Any:
        """In annotations it is the original."""
        return other | self._original


def _exchange(patch: CodePatch) -> Callable[[], None]:
    function, original = patch.function, patch.function.__code__
    function.__code__ = patch.code

    def undo() -> None:
        if function.__code__ is patch.code:
            function.__code__ = original

    return undo
