"""The description of a forward that retrieval compares: its words, its Triton operations, its shape.

Raw source is the wrong thing to embed: the model reads 256 word pieces and a forward has thousands. A description keeps
what tells operators apart. It is read off the syntax tree, so that a query costs no import and runs nobody's code.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rag.dataflow import flow_features
from rag.forward import ForwardPart, forward_part
from rag.structure import body_operations, count_grams, is_kernel
from rag.words import join_neighbours, split_words

DESCRIPTION_VERSION = 3
"""Raised when a description changes meaning: an index of another version must be rebuilt."""

NAME_WEIGHT = 3
"""How often a word of a name (kernel, stub, file) counts, against 1 for any other identifier or a docstring's word."""

DESCRIPTOR_TERMS = 70
"""Best words that go into the text which is embedded; with names and operations this fills 256 word pieces."""


@dataclass(frozen=True)
class Description:
    """What is known of one forward from its text."""

    docstring: str
    """First paragraph of the module's docstring, on one line."""
    names: tuple[str, ...]
    """Distinct words of the names of file, kernels and host functions, in order."""
    words: Mapping[str, int]
    """Weighted count of each word of identifiers, docstrings and names."""
    compounds: Mapping[str, int]
    """Weighted count of each two neighbouring words joined."""
    ops: Mapping[str, int]
    """Count of each operation in the kernels: `tl.dot`, `Mult`, `For`, ..."""
    grams: Mapping[str, int]
    """Count of each run of three operations in the kernels."""
    flow: Mapping[str, int]
    """Count of each feature of what is stored and how memory is walked: `flow_features`."""

    @property
    def terms(self) -> dict[str, int]:
        """Words, compounds and Triton operations together: what lexical search compares."""
        ops = Counter({op: count for op, count in self.ops.items() if op.startswith("tl.")})
        return dict(Counter(self.words) + Counter(self.compounds) + ops)

    @property
    def shape(self) -> dict[str, int]:
        """Operations, runs of three and flow together: what is compared where names mean nothing."""
        return {**self.ops, **self.grams, **self.flow}

    @property
    def descriptor(self) -> str:
        """The text to embed: docstring, names, most frequent words, Triton operations. It depends on no other pair."""
        ranked = sorted(self.words, key=lambda word: (-self.words[word], word))
        best = [word for word in ranked if len(word) > 1 and word not in self.names][:DESCRIPTOR_TERMS]
        ops = sorted(op.removeprefix("tl.") for op in self.ops if op.startswith("tl."))
        return f"{self.docstring} {' '.join(self.names)}. {' '.join(best)}. {' '.join(ops)}".strip()


def describe(source: str, path: Path | None = None, titles: tuple[str, ...] = ()) -> Description:
    """Describe the forward in a user's file or a pair file.

    `titles` are further names of the operator, such as a pair's slug. Without them the stem of `path` is one. Raises
    InputError if the source is not Python.
    """
    part = forward_part(source, path)
    functions = part.functions
    kernels = [function for function in functions if is_kernel(function)]
    titles = titles or ((path.stem,) if path is not None else ())
    names = [split_words(name) for name in (*titles, *(function.name for function in functions))]
    weighted = [*(split_words(text) for text in _texts(part)), *names * NAME_WEIGHT]
    bodies = body_operations(kernels or functions)
    return Description(
        docstring=" ".join(part.docstring.split("\n\n")[0].split()),
        names=tuple(dict.fromkeys(word for name in names for word in name)),
        words=dict(Counter(word for text in weighted for word in text)),
        compounds=dict(Counter(word for text in weighted for word in join_neighbours(text))),
        ops=dict(Counter(op for body in bodies for op in body)),
        grams=dict(count_grams(bodies)),
        flow=dict(flow_features(kernels)),
    )


def _texts(part: ForwardPart) -> list[str]:
    """Docstrings, and the names that the author chose, once per use: no attribute, keyword or builtin."""
    texts = [part.docstring, *(ast.get_docstring(function) or "" for function in part.functions)]
    for node in (node for statement in part.statements for node in ast.walk(statement)):
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
            texts.append(node.id)
        elif isinstance(node, ast.arg):
            texts.append(node.arg)
    return texts
