"""Hypotheses about terms: what comes through an output, a place in the forward, or a part of the cotangent."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kernel_agent.oracle.adjoint import Trial
from kernel_agent.oracle.factor_bank import local_guesses, ratio_guesses, variables_of
from kernel_agent.oracle.guesses import Guess
from kernel_agent.oracle.residual import fit, norm
from kernel_agent.oracle.term_groups import Term, terms_of
from kernel_agent.oracle.terms import Form, Place
from kernel_agent.oracle.value_names import Names

_NEGLIGIBLE = 1e-9
"""Norm of a term over the norm of the gradient below which it is rounding."""
_PAIRS = 400
"""Pairs of terms that are tried at most."""
_BLOCKS = (8, 16, 32, 64, 128)


class Terms:
    """Guesses about one forward; made for the first case, good for all."""

    def __init__(self, first: Trial, file: str, blocks: Sequence[int]) -> None:
        self.first = first
        self.blocks = sorted({*blocks, *_BLOCKS})
        # of equal terms the later place is where a term joins the others, and a named one says more
        placed = [term for term in terms_of(first.adjoint.edges, file)[::-1] if term.line is not None]
        self.terms = sorted(placed, key=lambda term: not term.variable)
        self._find_neutral()

    def guesses(self) -> Iterator[Guess]:
        """From the likely to the far-fetched."""
        yield from self.of_outputs()
        yield from self.of_strides()
        yield from (guess for _, guess in self.singles)
        yield from self.of_variables()
        yield from self.of_pairs()
        yield from self.of_blocks()
        names = [Names(module) for module in self.first.adjoint.edges.modules]
        variables = variables_of(self.first, names)
        known = [(term, guess.known) for term, guess in self.singles if guess.known is not None]
        yield from ratio_guesses(self.first, known, variables)
        yield from local_guesses(self.first, names, variables)

    def _find_neutral(self) -> None:
        """Cut for good what adds up to nothing; one after the other, since only one of two that cancel may go."""
        adjoint = self.first.adjoint
        for term in self.terms:
            if self._negligible(self.first.cut(term.gate)):
                before, adjoint.neutral = adjoint.neutral, (*adjoint.neutral, term.gate)
                if not self._negligible(self.first.beyond(adjoint.gradients(self.first.cotangents))):
                    adjoint.neutral = before

    def _negligible(self, parts: Mapping[str, Tensor]) -> bool:
        return all(norm(part) <= _NEGLIGIBLE * norm(self.first.truth[name]) for name, part in parts.items())

    @cached_property
    def singles(self) -> list[tuple[Term, Guess]]:
        """One guess per term that contributes anything, with its direction."""
        found = []
        for term in self.terms:
            effect = self.first.cut(term.gate)
            if not self._negligible(effect):
                found.append((term, _cutting(Form.TERM, (term,)).with_known(effect)))
        return found

    def of_outputs(self) -> Iterator[Guess]:
        """The part of the gradient that comes from one output, where there are several."""
        positions = [i for i, cotangent in enumerate(self.first.cotangents) if cotangent is not None]
        if len(positions) < 2:
            return
        for position in positions:

            def effect(trial: Trial, position: int = position) -> Mapping[str, Tensor]:
                alone = [c if i == position else None for i, c in enumerate(trial.cotangents)]
                return trial.adjoint.gradients(alone)

            yield Guess(Form.OUTPUT, effect, free=True, output=position)

    def of_strides(self) -> Iterator[Guess]:
        """The gradient under the cotangent as a kernel reads it that does not look at its strides."""
        if all(c is None or c.is_contiguous() for c in self.first.cotangents):
            return

        def effect(trial: Trial) -> Mapping[str, Tensor]:
            misread = [None if c is None else _flat_read(c) for c in trial.cotangents]
            return trial.beyond(trial.adjoint.gradients(misread))

        yield Guess(Form.STRIDES, effect)

    def of_variables(self) -> Iterator[Guess]:
        """All terms through one variable, through one line, and all that run through statistics."""
        sets: list[list[Term]] = []
        by_name: dict[str, list[Term]] = defaultdict(list)
        by_line: dict[int | None, list[Term]] = defaultdict(list)
        for term, _ in self.singles:
            by_name[term.variable].append(term)
            by_line[term.line].append(term)
        by_name.pop("", None)
        sets += [terms for terms in (*by_name.values(), *by_line.values()) if len(terms) > 1]
        sets.append([term for term, _ in self.singles if term.reduced])
        for terms in sets:
            yield _cutting(Form.TERMS, terms)

    def of_pairs(self) -> Iterator[Guess]:
        """Two terms with one factor: the sum of their directions fits before anything is computed again."""
        pairs = itertools.islice(itertools.combinations(self.singles, 2), _PAIRS)
        for (one, first), (two, second) in pairs:
            assert first.known is not None
            assert second.known is not None
            both = {name: part + second.known[name] for name, part in first.known.items()}
            if any(fit(residual, both[name]).exact for name, residual in self.first.residuals.items()):

                def effect(trial: Trial, one: Term = one, two: Term = two) -> Mapping[str, Tensor]:
                    parts = trial.cut(one.gate), trial.cut(two.gate)
                    return {name: part + parts[1][name] for name, part in parts[0].items()}

                yield Guess(Form.TERMS, effect, _places((one, two)), free=True, known=both)

    def of_blocks(self) -> Iterator[Guess]:
        """The gradient without the last elements of a cotangent along a dimension: of the whole, and of each term."""
        for output, dim, size in self._tails():

            def effect(trial: Trial, output: int = output, dim: int = dim, size: int = size) -> Mapping[str, Tensor]:
                tails = [_tail(c, dim, size) if i == output else None for i, c in enumerate(trial.cotangents)]
                return {name: -part for name, part in trial.adjoint.gradients(tails).items()}

            yield Guess(Form.BLOCK, effect, output=output, dim=dim, size=size)

    def _tails(self) -> Iterator[tuple[int, int, int]]:
        """(output, dimension, elements) of every last block that is not the whole."""
        for output, cotangent in enumerate(self.first.cotangents):
            if cotangent is None:
                continue
            for dim, length in enumerate(cotangent.shape):
                sizes = {1, *(length % block for block in self.blocks), *self.blocks}
                for size in sorted(size for size in sizes if 0 < size < length):
                    yield output, dim, size


def _cutting(form: Form, terms: Sequence[Term]) -> Guess:
    gates = [term.gate for term in terms]
    return Guess(form, lambda trial: trial.cut(*gates), _places(terms), free=True)


def _places(terms: Sequence[Term]) -> tuple[Place, ...]:
    places = [Place(line=term.line, variable=term.variable) for term in terms]
    return tuple(sorted(dict.fromkeys(places), key=lambda place: (place.line or 0, place.variable)))


def _flat_read(cotangent: Tensor) -> Tensor:
    """What stands at the contiguous offsets from the first element; NaN beyond the end of the memory."""
    reach = 1 + sum((n - 1) * step for n, step in zip(cotangent.shape, cotangent.stride(), strict=True))
    flat = cotangent.as_strided((reach,), (1,), cotangent.storage_offset()).to(torch.float64)
    missing = max(0, cotangent.numel() - reach)
    return torch.nn.functional.pad(flat, (0, missing), value=torch.nan)[: cotangent.numel()].view(cotangent.shape)


def _tail(cotangent: Tensor | None, dim: int, size: int) -> Tensor | None:
    """The cotangent, zero but for its last elements along a dimension."""
    if cotangent is None:
        return None
    kept = torch.zeros(cotangent.shape, dtype=torch.float64)
    start = cotangent.shape[dim] - size
    kept.narrow(dim, start, size).copy_(cotangent.narrow(dim, start, size))
    return kept
