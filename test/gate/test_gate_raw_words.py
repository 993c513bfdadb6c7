"""Stamps of what objects hold, read from memory: each change must give another one, whoever makes it."""

from __future__ import annotations

import types

import pytest

from kernel_agent.gate.raw_words import PARTS, VERSION, Words, dict_of

pytestmark = pytest.mark.skipif(VERSION is None, reason="dicts of this Python have no version")


def _stored_in_a_loop(space):
    for number in range(100):  # so often that the interpreter replaces the general instruction by a special one
        space.one = str(number)


def _stored_by_its_own_code(space):
    exec("def store(value):\n    global one\n    one = value", vars(space))
    for number in range(100):
        space.store(str(number))


WAYS = {
    "set": lambda space: setattr(space, "one", 2),
    "added": lambda space: setattr(space, "three", 2),
    "removed": lambda space: delattr(space, "one"),
    "set in a loop": _stored_in_a_loop,
}
WAYS_OF_MODULES = {
    "by its own code": _stored_by_its_own_code,
    "updated": lambda space: vars(space).update(one=2),
    "popped": lambda space: vars(space).pop("one"),
    "popped at the end": lambda space: vars(space).popitem(),
    "cleared": lambda space: vars(space).clear(),
    "set by default": lambda space: vars(space).setdefault("four", 2),
    "united": lambda space: vars(space).__ior__({"one": 2}),
}


def _module():
    module = types.ModuleType("some")
    module.one, module.two = 1, 2
    return module


@pytest.mark.parametrize(
    ("space", "way"),
    [
        *((make, way) for make in (_module, lambda: type("Some", (), {"one": 1, "two": 2})) for way in WAYS.values()),
        *((_module, way) for way in WAYS_OF_MODULES.values()),
    ],
)
def test_whoever_changes_a_dict_gives_it_another_version(space, way):
    # One that is not seen here would be a patch that no verdict names.
    space = space()
    version = Words([id(dict_of(space))], [VERSION])
    before = version.read()
    assert [space.one, *vars(space).values()].count(2) == 1
    assert (version.read() == before).all(), "a look changes nothing"
    way(space)
    assert (version.read() != before).all()


def test_parts_of_functions_are_found_by_their_addresses():
    def function(one=1, *, two=2):
        return one + two

    assert PARTS is not None
    words = Words([id(function)], PARTS)
    expected = [id(function.__code__), id(function.__defaults__), id(function.__kwdefaults__)]
    assert words.read().tolist() == [expected]


def test_a_dict_that_is_made_for_everybody_who_asks_has_no_stamp():
    # Its memory is somebody else's a moment later.
    class Made(types.ModuleType):
        @property
        def __dict__(self):
            return {"one": 1}

    assert dict_of(Made("made")) is None


def test_no_objects_have_no_words():
    assert Words([], [VERSION]).read().shape == (0, 1)
