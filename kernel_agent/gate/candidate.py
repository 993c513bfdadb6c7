"""A pair file as the gate reads it: the text that the candidate child gets, and what its syntax tree already says."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from dataclasses import dataclass

from kernel_agent.errors import InputError
from kernel_agent.gate.judge import Problem
from kernel_agent.gate.kernels_alone import users_lines
from kernel_agent.gate.verdict import Status
from kernel_agent.gate.words import caret, listed, quoted
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.meta import PairMeta, read_meta
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.statements import statements
from kernel_agent.pairs.syntax import accepts, line_nested_deeper

_DEEPEST = 256
"""Levels of a file's syntax tree that are read: what is accepted is walked by functions that call themselves."""

_MOST_CHARACTERS = 1 << 18
"""Of a file: fifteen times the longest one of the dataset. Reading it is under no limit of time, unlike running it."""
_ASCII_LIKE = ("ascii", "iso-8859-1", "cp1252")
"""Encodings in which ASCII characters stand for themselves, whatever stands before them."""


@dataclass(frozen=True)
class CandidateText:
    """One candidate before anything of it runs."""

    source: str
    """The whole pair file."""
    shown: str
    """What the candidate child imports: everything above the check section, with the same line numbers."""
    meta: PairMeta
    accepts_needs: bool
    """Whether `backward` takes the keyword `needs`."""
    problem: Problem | None = None
    """Why it need not be run at all."""
    users_lines: int = 0
    """So many lines from the top are the user's own: what they change when imported is no candidate's doing."""


def read_candidate(spec: KernelSpec, source: str) -> CandidateText:
    """Read a pair file without executing it. Raises `InputError` where its format is broken beyond judging."""
    if len(source) > _MOST_CHARACTERS:
        raise InputError(
            f"the file has {len(source):,} characters, more than {_MOST_CHARACTERS:,}",
            remedy="Write the backward by hand-sized kernels; tables belong into tensors that the forward saves.",
        )
    sections = split_sections(source)
    shown = sections.above_check
    if not reads_as_it_is(shown):
        said = "its first lines declare an encoding other than UTF-8: Python would read other text than is judged"
        return _invalid(spec, source, shown, f"the file is no valid Python here: {said}", 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's advice on escapes is for who wrote them
            tree = ast.parse(shown)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        line = error.lineno if isinstance(error, SyntaxError) else None
        said = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
        column = error.offset - 1 if isinstance(error, SyntaxError) and error.offset else None
        place = "" if column is None else caret(source, line, column)
        return _invalid(spec, source, shown, f"the file is no valid Python: {said}", line, place)
    deep = line_nested_deeper(tree, _DEEPEST)
    if deep is not None:
        return _invalid(spec, source, shown, f"the file is nested more than {_DEEPEST} levels deep", deep)
    meta = read_meta(source)
    if meta.grads != spec.grads:
        raise InputError(
            f"META says grads={meta.grads}, the gradients wanted are {spec.grads}",
            remedy="Return the gradients of these inputs, in this order.",
        )
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    problem: Problem | None = None
    if not sections.backward.strip():
        problem = Problem(Status.NO_CODE, "the backward section is empty")
    elif any(node.lineno < sections.backward_line <= (node.end_lineno or 0) for node in tree.body):
        message = "the backward section goes on with a statement that begins above it: begin it at the left margin"
        problem = Problem(Status.BAD_FORMAT, message, sections.backward_line)
    elif "backward" not in functions or functions["backward"].lineno < sections.backward_line:
        message = "the backward section defines no function `backward(saved, *grad_outputs, needs=None)`"
        problem = Problem(Status.BAD_FORMAT, message)
    elif "forward" not in functions:
        problem = Problem(Status.BAD_FORMAT, "the forward section defines no function `forward`")
    elif rebound := _bound(shown) & _bound(sections.check):
        names = listed(sorted(rebound))
        message = f"the check section binds {names} again: the delivered file would run something else than is proven"
        problem = Problem(Status.BAD_FORMAT, message)
    backward = functions.get("backward")
    accepts_needs = backward is not None and accepts(backward, "needs")
    return CandidateText(source, shown, meta, accepts_needs, problem, users_lines(source, default_pair(spec)))


def reads_as_it_is(text: str) -> bool:
    """Whether Python reads these characters in a UTF-8 file, where a comment on the first lines may declare otherwise.

    An encoding such as `raw_unicode_escape` makes code of what is a comment to all that read the text.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(text.encode(errors="replace")).readline)
    except SyntaxError:  # one that Python does not know either
        return False
    return encoding in ("utf-8", "utf-8-sig") or (encoding in _ASCII_LIKE and text.isascii())


def default_pair(spec: KernelSpec) -> str:
    """The pair file that the user's own code gives."""
    return spec.facts.source if spec.facts.is_pair else assemble(spec, Candidate(backward=""))


def _invalid(
    spec: KernelSpec, source: str, shown: str, message: str, line: int | None, details: str = ""
) -> CandidateText:
    problem = Problem(Status.COMPILE_ERROR, message + quoted(source, line), line, details=details)
    return CandidateText(source, shown, PairMeta(grads=spec.grads), False, problem)


def _bound(text: str) -> frozenset[str]:
    """Names that a part of a file binds at module level, imports aside: those may well stand twice."""
    return frozenset(name for item in statements(text) if not item.is_import for name in item.binds)
