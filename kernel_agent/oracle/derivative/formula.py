"""Terms as lines of assignments: what is used twice gets a name, runs of equal steps are told once."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.oracle.derivative.constants import Constants
from kernel_agent.oracle.derivative.terms import Number, Term

_LEGEND = {
    "place(": "place(v at T=3): v there, zero elsewhere",
    "all of ": "all of T: the sum of what is placed along T",
    "outer(": "outer(a, b): a along rows, b along columns",
    "scatter": "scatter_V(v at i): v at the indices i along V, zero elsewhere; scatter_add sums what meets",
    "from the end": "cumsum from the end: element i sums all from i on",
}
"""Text of a line -> what it means, told once."""

LONGEST = 88
"""Characters of an expression that stands within another one, at most."""

MOST_WRITTEN = 4
"""Whole numbers up to this are what somebody wrote, not a product of dims."""

_RANK = {"or": 0, "and": 0, "==": 1, "!=": 1, "<": 1, "<=": 1, ">": 1, ">=": 1, "+": 2, "-": 2, "*": 3, "/": 3, "//": 3}
_RANK |= {"neg": 3, "@": 4, "^": 5, "T": 5}
_ATOM = 9

_NAMES = {
    "mean": "mean",
    "rsqrt": "rstd",
    "softmax": "p",
    "log_softmax": "logp",
    "exp": "e",
    "max": "top",
    "sigmoid": "sig",
    "logsumexp": "lse",
    "tanh": "th",
    "sum": "s",
    "where": "w",
    "erf": "er",
}
"""What a value without a name is called, by its operation; else `t`."""

_CONSTANTS = {
    "1/sqrt(2)": math.sqrt(0.5),
    "1/sqrt(2*pi)": 1 / math.sqrt(2 * math.pi),
    "sqrt(2/pi)": math.sqrt(2 / math.pi),
    "2/sqrt(pi)": 2 / math.sqrt(math.pi),
    "log2(e)": math.log2(math.e),
    "ln(2)": math.log(2),
    "inf": math.inf,
    "-inf": -math.inf,
}


@dataclass(frozen=True)
class Named:
    """A result."""

    name: str
    term: Term


class Formula:
    """Lines for some results."""

    def __init__(
        self,
        results: Sequence[Named],
        known: Mapping[int, str],
        sizes: Mapping[str, int],
    ) -> None:
        self.results = results
        self.sizes = sizes
        self.constants = Constants()
        self._uses = Counter(id(arg) for term in self._reached() for arg in term.args)
        self._uses.update(id(result.term) for result in results)
        self._pieces = {id(arg) for term in self._reached() if _is_long(term) for arg in term.args}
        self._names: dict[int, str] = {}
        self._texts: dict[int, tuple[str, int]] = {}
        taken = {str(term.note) for term in self._reached() if term.op == "name"} | {result.name for result in results}
        self._taken = taken
        self._known = {key: name for key, name in known.items() if name not in taken}

    def lines(self) -> tuple[str, ...]:
        """`name = expression`, in the order of computation, results where they are complete."""
        found: list[str] = []
        results: dict[int, list[str]] = {}
        for result in self.results:
            results.setdefault(id(result.term), []).append(result.name)
        for term in self._reached():
            mine = results.get(id(term), [])
            text, rank = self._text(term)
            if mine:
                found += [f"{name} = {text if place == 0 else mine[0]}" for place, name in enumerate(mine)]
                self._texts[id(term)] = (mine[0], _ATOM) if term.args else (text, rank)
            elif self._deserves_name(term, text):
                name = self._name(term)
                found.append(f"{name} = {text}")
                self._texts[id(term)] = (name, _ATOM)
            else:
                self._texts[id(term)] = (text, rank)
        return tuple(found)

    def _reached(self) -> list[Term]:
        """Terms that results are made of, arguments first."""
        seen: dict[int, Term] = {}
        waiting = [result.term for result in self.results]
        while waiting:
            term = waiting.pop()
            if id(term) not in seen:
                seen[id(term)] = term
                waiting += term.args
        order: dict[int, Term] = {}
        for term in sorted(seen.values(), key=lambda one: one.place):
            self._before(term, order)
        return list(order.values())

    @staticmethod
    def _before(term: Term, order: dict[int, Term]) -> None:
        """Arguments before what is made of them, whatever rules made first."""
        waiting = [(term, False)]
        while waiting:
            here, ready = waiting.pop()
            if id(here) in order:
                continue
            if ready:
                order[id(here)] = here
            else:
                waiting.append((here, True))
                waiting += [(arg, False) for arg in reversed(here.args)]

    def _deserves_name(self, term: Term, text: str) -> bool:
        if not term.args or term.op in ("places", "total"):
            return False
        if id(term) in self._pieces:
            return True
        simple = term.op in ("neg", "T", "part") and not term.args[0].args
        if id(term) in self._known and (self._uses[id(term)] > 1 or len(text) > 16):
            return not simple
        short = 14 if term.op in _RANK else 8
        return len(text) > LONGEST or (self._uses[id(term)] > 1 and not simple and len(text) > short)

    def _name(self, term: Term) -> str:
        wanted = self._known.get(id(term)) or _NAMES.get(term.op, "t")
        name = wanted if wanted not in ("t", "s", "w") else f"{wanted}1"
        number = 1
        while name in self._taken:
            number += 1
            name = f"{wanted}{number}"
        self._taken.add(name)
        return name

    # --- text

    def _text(self, term: Term) -> tuple[str, int]:
        """Text and rank of a term whose arguments have theirs."""
        parts = [self._texts[id(arg)] for arg in term.args]
        if term.op == "number":
            return self._number(term.note), _ATOM
        if term.op == "name":
            return str(term.note), _ATOM
        if term.op == "neg":
            return f"-{_within(parts[0], 3)}", 3
        if term.op == "T":
            return f"{_within(parts[0], 6)}^T", 5
        if term.op == "^":
            return f"{_within(parts[0], 6)}^{_within(parts[1], 6)}", 5
        if term.op == "total":
            shown = [text for text, _ in parts]
            return " + ".join(shown if len(shown) < 4 else [shown[0], shown[1], "...", shown[-1]]), _RANK["+"]
        if term.op in _RANK:
            rank = _RANK[term.op]
            if term.op == "/" and term.args[1].op == "number":
                parts[1] = (self._divisor(term.args[1].note), _ATOM)
            return f"{_within(parts[0], rank)} {term.op} {_within(parts[1], rank + (term.op in ('-', '/', '@')))}", rank
        return self._call(term, [text for text, _ in parts], parts), _ATOM

    def _call(self, term: Term, texts: list[str], parts: list[tuple[str, int]]) -> str:
        note = str(term.note)
        if term.op == "part":
            return f"{_within(parts[0], _ATOM)}[{note}]"
        if term.op == "at":
            return f"place({texts[0]} at {note})"
        if term.op == "places":
            shown = texts if len(texts) < 4 else [texts[0], texts[1], "...", texts[-1]]
            return f"all of {note.rstrip('=')}: {' + '.join(shown)}"
        if term.op == "lookup":
            return f"{_within(parts[0], _ATOM)}[{', '.join(texts[1:])}]"
        if term.op in ("gather", "scatter", "scatter_add"):
            return f"{term.op}{_subscript(note)}({texts[0]} at {texts[1]})"
        if term.op == "set":
            return f"set({texts[0]} at {texts[1]} to {texts[2]})"
        if term.op == "with":
            return f"{texts[0]} with {texts[1]} = {texts[2]}"
        if term.op == "index":
            return f"index of {note}"
        if term.op in ("stack", "concat") and len(texts) > 4:
            texts = [texts[0], texts[1], "...", texts[-1]]
        if note.startswith("|"):
            return f"{term.op}({', '.join([*texts, *note[1:].split(',')])})"
        return f"{term.op}{_subscript(note)}({', '.join(texts)})"

    def _number(self, value: Number | str) -> str:
        if isinstance(value, (bool, str)):
            return str(value)
        if isinstance(value, int):
            return str(value) if abs(value) <= MOST_WRITTEN else self.constants.mark(value)
        for name, known in _CONSTANTS.items():
            if math.isclose(value, known, rel_tol=1e-7):
                return name
        inverse = 1 / value if value else 0.0
        if _is_count(inverse) and self._size(round(inverse)):
            return f"(1/{self._size(round(inverse))})"
        if _is_count(inverse * inverse) and self._size(round(inverse * inverse)):
            return f"(1/sqrt({self._size(round(inverse * inverse))}))"
        return self.constants.mark(value) if math.isfinite(value) else f"{value:g}"

    def _divisor(self, value: Number | str) -> str:
        """A number that is divided by: counts of elements appear nowhere else."""
        return (self._size(value) if type(value) is int else "") or self._number(value)

    def _size(self, value: int) -> str:
        """The dims that a whole number is made of; empty where none are."""
        names = [name for name, size in self.sizes.items() if size == value and value > 4]
        if names:
            return names[0]
        listed = [(name, size) for name, size in self.sizes.items() if size > 2]
        pairs = [(a, b) for i, (a, n) in enumerate(listed) for b, m in listed[i + 1 :] if n * m == value]
        return f"({pairs[0][0]}*{pairs[0][1]})" if pairs else ""


def _is_count(value: float) -> bool:
    """Whether a number is whole, and none that people write themselves the inverse of, such as 0.1 or 0.25."""
    whole = round(value)
    written = whole % 5 == 0 or whole & (whole - 1) == 0
    return value > 5 and not written and math.isclose(value, whole, rel_tol=1e-6)


def _is_long(term: Term) -> bool:
    """Whether a sum has an addend for every step of a loop: each of them is then a line."""
    return term.op == "places" or (term.op == "total" and len(term.args) > 3)


def _subscript(note: str) -> str:
    """`_N`, `_{M,N}`, or nothing."""
    return "" if not note else f"_{note}" if re.fullmatch(r"\w+", note) else f"_{{{note}}}"


def _within(part: tuple[str, int], rank: int) -> str:
    """A text in an operation of some rank, in brackets where it needs them."""
    text, own = part
    return text if own >= rank else f"({text})"


def legend(lines: Sequence[str]) -> tuple[str, ...]:
    """Comments on what is not common notation in some lines."""
    return tuple(f"# {meaning}" for text, meaning in _LEGEND.items() if any(text in line for line in lines))


def folded(lines: Sequence[str], results: Collection[str], least: int = 3) -> tuple[str, ...]:
    """Lines in which runs of steps of one form, the iterations of a loop, are told by their second step.

    Lines that give `results` are steps of their own.
    """
    made = {line.partition(" = ")[0] for line in lines} - set(results)
    forms = [_form(line, made) for line in lines]
    found: list[str] = []
    place = 0
    while place < len(lines):
        period, times = _run(forms, place, least)
        if times < least:
            found.append(lines[place])
            place += 1
            continue
        found.append(f"repeat {times} times, the second time as here:")
        found += [f"    {line}" for line in lines[place + period : place + 2 * period]]
        place += period * times
    return tuple(found)


def _run(forms: Sequence[str], place: int, least: int) -> tuple[int, int]:
    """Period and number of repetitions of the run that covers most lines from a place on."""
    best = (1, 1)
    for period in range(1, min(40, (len(forms) - place) // least) + 1):
        times = 1
        step = forms[place : place + period]
        while forms[place + times * period : place + (times + 1) * period] == step:
            times += 1
        if times >= least and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def _form(line: str, made: Collection[str]) -> str:
    """A line without numbers, and without the names that lines of this text give."""
    return re.sub(r"\w+", lambda word: "#" if word[0] in made or word[0].isdecimal() else word[0], line)
