"""Words out of code: identifiers and sentences split into the parts that two authors of one operator share."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+\d*|[A-Z]+\d*")

# Words that every Triton file contains, or that say nothing about what it computes.
_STOPPED = (
    "an and are as at be but by each every for from if in into is it its of on or over per so such than that the "
    "their then this to where which with self jit kernel kernels forward fwd backward bwd tl torch triton"
)
STOP_WORDS = frozenset(_STOPPED.split())


_LAYOUT = (
    "acc base block blocks ceil col cols count cur device dim dims dst dtype dx dy elem elements end eps grid hi "
    "idx index inp input inputs len length lo mask max min num numel off offs offset offsets out output outputs "
    "pid pids prev program programs ptr ptrs res result row rows run shape size sizes src start step stride "
    "strides tile tiles tmp val warps width x1 x2 xs ys"
)
LAYOUT_WORDS = frozenset(_LAYOUT.split())
"""Words of the way a kernel walks memory. Two kernels that share them need have nothing else in common."""


def split_words(text: str) -> list[str]:
    """The lower-case parts of identifiers or prose, without stop words: `_layer_normFwd` gives `layer norm`.

    Parts of one letter are words: `q`, `k`, `v` tell attention from a norm.
    """
    words = (match.group().lower() for match in _PART.finditer(text))
    return [word for word in words if word not in STOP_WORDS]


def join_neighbours(words: Sequence[str]) -> Iterator[str]:
    """Each two neighbours of more than one letter as one word, so that `layer_norm` meets `layernorm`."""
    for left, right in itertools.pairwise(words):
        if len(left) > 1 and len(right) > 1:
            yield left + right
