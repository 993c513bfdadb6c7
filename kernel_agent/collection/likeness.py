"""Near-duplicates: no two pairs of the collection may share too many runs of tokens.

Tokens are those of the code alone, without comments, docstrings and layout, and names that authors choose all count as
one: renaming makes no new pair. Names of Python, Triton and torch, attributes and numbers count as they are. Likeness
is the Jaccard index of the sets of five successive tokens.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.syntax import parse

GRAM = 5
FORWARD_LIMIT = 0.8
"""Forwards of two pairs that reach this are one forward: two schedules of one operation still differ in structure."""
BACKWARD_LIMIT = 0.9
LEAST = 50
"""Runs of tokens below which a section is not compared: it only calls kernels that stand in the other one."""

_TOKEN = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[A-Za-z_]\w*|\d[\w.]*|//=|\*\*|//|[-+*/%<>=!&|^@]=|->|<<|>>|\S")
_COMMENT = re.compile(r"#.*")
_KEPT = frozenset({*dir(builtins), *keyword.kwlist, "tl", "triton", "torch", "libdevice", "math"})


@dataclass(frozen=True)
class Twins:
    """Two pairs that are too much alike."""

    one: Path
    other: Path
    section: str
    """`forward` or `backward`."""
    likeness: float

    def __str__(self) -> str:
        names = f"{self.one.parent.name}/{self.one.stem} and {self.other.parent.name}/{self.other.stem}"
        limit = FORWARD_LIMIT if self.section == "forward" else BACKWARD_LIMIT
        return f"the {self.section}s of {names} are too much alike: {self.likeness:.2f}, below {limit} is allowed"


def near_duplicates(sources: Mapping[Path, str]) -> list[Twins]:
    """All couples of pair files over a limit, the most alike first. Raises `InputError` for what is no pair file."""
    sections = {path: split_sections(source) for path, source in sources.items()}
    found = []
    for name, limit in (("forward", FORWARD_LIMIT), ("backward", BACKWARD_LIMIT)):
        texts = {path: getattr(sections[path], name) for path in sections}
        paths = [path for path, text in texts.items() if len(token_grams(text)) >= LEAST]
        alike = likenesses([texts[path] for path in paths])
        for i, j in zip(*np.nonzero(np.triu(alike, 1) >= limit), strict=True):
            found.append(Twins(paths[i], paths[j], name, float(alike[i, j])))
    return sorted(found, key=lambda twins: (-twins.likeness, str(twins.one), str(twins.other)))


def likenesses(texts: Iterable[str]) -> NDArray[np.float64]:
    """Jaccard index of the grams of all couples of texts, (texts, texts) float64; 1 on the diagonal."""
    grams = [token_grams(text) for text in texts]
    seen = Counter(gram for own in grams for gram in own)
    columns = {gram: place for place, gram in enumerate(gram for gram, count in seen.items() if count > 1)}
    shared = np.zeros((len(grams), len(columns)), np.float32)  # what one text alone has adds to no intersection
    for row, own in enumerate(grams):
        shared[row, [columns[gram] for gram in own if gram in columns]] = 1.0
    both = (shared @ shared.T).astype(np.float64)
    sizes = np.array([len(own) for own in grams], np.float64)
    union = sizes[:, None] + sizes[None, :] - both
    np.fill_diagonal(both, sizes)
    np.fill_diagonal(union, sizes)
    alike: NDArray[np.float64] = both / np.maximum(union, 1.0)
    return alike


@functools.lru_cache(maxsize=4096)
def token_grams(text: str) -> frozenset[int]:
    """The runs of `GRAM` tokens of a section, as hashes that are equal in every process."""
    tokens = _normal(_TOKEN.findall(_COMMENT.sub("", _without_docstrings(text))))
    runs = zip(*(tokens[start:] for start in range(GRAM)), strict=False)
    digests = (hashlib.blake2b("\0".join(run).encode(), digest_size=8).digest() for run in runs)
    return frozenset(int.from_bytes(digest, "big") for digest in digests)


def _normal(tokens: list[str]) -> list[str]:
    """The tokens with one name for all names that an author chose."""
    before = ["", *tokens]
    return [
        "name" if token.isidentifier() and token not in _KEPT and last != "." else token
        for token, last in zip(tokens, before, strict=False)
    ]


def _without_docstrings(text: str) -> str:
    """The text with the lines of docstrings empty."""
    lines = text.split("\n")
    for node in ast.walk(parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            said = node.body[0]
            lines[said.lineno - 1 : said.end_lineno] = [""] * ((said.end_lineno or said.lineno) - said.lineno + 1)
    return "\n".join(lines)
