"""Print how well retrieval tells the shipped pairs apart, and the thresholds that follow from it.

Run: python bench/rag_calibration.py [FOLDER OF PAIRS] > bench/rag_calibration.txt

Every pair is a query in turn and is itself taken out. A pair of the same family is what a search should find; a pair of
another family should mostly not be shown. Leave-one-out flatters nothing: pairs of one author share a style, so figures
between families are, if anything, higher than for strangers' files.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rag_wordings import renamed

from kernel_agent.data import pairs_root
from kernel_agent.pairs.sections import split_sections
from rag import Signal, build_index
from rag.describe import Description, describe
from rag.index import Index
from rag.ranking import FEW_KNOWN_WORDS, Ranking, dense_cosines, known_words, weights_of
from rag.retrieval import MIN_SIM
from rag.schedules import LEAST_LIKE

Matrix = npt.NDArray[np.float64]


def matrix(index: Index, queries: list[Description], of: Callable[[Description, Index], Matrix]) -> Matrix:
    """Cosines of each query with each pair, the query's own pair set to -1: float64 [n, n]."""
    result = np.stack([of(query, index) for query in queries])
    np.fill_diagonal(result, -1.0)
    return result


def fused(queries: list[Description], index: Index, **parts: Matrix) -> Matrix:
    """What a search orders by, row by row."""
    result = np.zeros((len(queries), len(index.entries)))
    for row, query in enumerate(queries):
        weights = weights_of(len(known_words(query, index)))
        for name, part in parts.items():
            families = None if name == Signal.STRUCTURE.value else index.families
            result[row] += weights[Signal(name)] / (60 + Ranking.of(part[row], families=families).ranks)
    return result


def hit_rate(scores: Matrix, kin: npt.NDArray[np.bool_], k: int) -> float:
    """Share of queries with a pair of their family among the first k; queries without kin are not counted."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(kin, best, axis=1).any(axis=1)
    return float(found[kin.any(axis=1)].mean())


def report_hits(kin: npt.NDArray[np.bool_], **views: Matrix) -> None:
    """Print how often each view finds a pair of the query's family."""
    for name, scores in views.items():
        at_1, at_4 = hit_rate(scores, kin, 1), hit_rate(scores, kin, 4)
        print(f"  {name:10s} a pair of the same family at 1: {at_1:.2f}  among 4: {at_4:.2f}")


def report_threshold(signal: Signal, cosines: Matrix, kin: npt.NDArray[np.bool_]) -> None:
    """Print the cosines within and between families and the threshold that the latter suggest."""
    others = ~kin & ~np.eye(len(kin), dtype=bool)
    strangers = np.quantile(cosines[others], [0.5, 0.9, 0.95, 0.99])
    nearest_kin = np.where(kin, cosines, -1.0).max(axis=1)[kin.any(axis=1)]
    print(
        f"\n{signal.value}: default min-sim {MIN_SIM[signal]:.2f}, 90 % of other families lie below {strangers[1]:.3f}"
    )
    print("  other families, quantiles .5 .9 .95 .99: " + " ".join(f"{value:.3f}" for value in strangers))
    own = np.quantile(nearest_kin, [0.05, 0.25, 0.5])
    print("  nearest of own family, quantiles .05 .25 .5: " + " ".join(f"{value:.3f}" for value in own))
    print(f"  at the default: {(cosines[others] >= MIN_SIM[signal]).mean():.1%} of other families' pairs pass,")
    print(f"  and {(nearest_kin >= MIN_SIM[signal]).mean():.1%} of queries keep a pair of their family")


def main() -> None:
    """Print the report."""
    pairs = Path(sys.argv[1]) if len(sys.argv) > 1 else pairs_root()
    with tempfile.TemporaryDirectory() as folder:
        index = build_index(pairs, Path(folder))
        forwards = [split_sections((pairs / entry.path).read_text(encoding="utf-8")) for entry in index.entries]
    families = np.array([entry.family for entry in index.entries])
    kin = (families[:, None] == families[None, :]) & ~np.eye(len(families), dtype=bool)
    # As a user would write it: the head's docstring and the forward, no slug, no family.
    queries = [describe(sections.head + sections.forward) for sections in forwards]
    strange = [describe(renamed(sections.forward)) for sections in forwards]

    dense = matrix(index, queries, dense_cosines)
    lexical = matrix(index, queries, lambda query, index: index.lexical.cosines(query.terms))
    structure = matrix(index, queries, lambda query, index: index.structure.cosines(query.shape))
    print(f"{len(families)} pairs, {len(set(families))} families, {kin.any(axis=1).sum()} pairs with kin")
    together = fused(queries, index, dense=dense, lexical=lexical, structure=structure)
    report_hits(kin, dense=dense, lexical=lexical, structure=structure, fused=together)
    for signal, scores in ((Signal.DENSE, dense), (Signal.LEXICAL, lexical), (Signal.STRUCTURE, structure)):
        report_threshold(signal, scores, kin)

    named = dense, lexical
    known = [len(known_words(query, index)) for query in strange]
    print(f"\ntelling words known from other pairs: at least {least_known(index, queries)}; with every name renamed at")
    print(f"  most {max(known)}; structure ranks below {FEW_KNOWN_WORDS}")
    print("every name renamed and no docstring:")
    dense = matrix(index, strange, dense_cosines)
    lexical = matrix(index, strange, lambda query, index: index.lexical.cosines(query.terms))
    together = fused(strange, index, lexical=lexical, structure=structure)
    report_hits(kin, dense=dense, lexical=lexical, structure=structure, fused=together)
    report_constants({Signal.DENSE: named[0], Signal.LEXICAL: named[1], Signal.STRUCTURE: structure}, kin)


def report_constants(cosines: dict[Signal, Matrix], kin: npt.NDArray[np.bool_]) -> None:
    """Print the thresholds to set: 90 % of the pairs of other families lie below `MIN_SIM`."""
    others = ~kin & ~np.eye(len(kin), dtype=bool)
    below = {signal: float(np.quantile(matrix[others], 0.9)) for signal, matrix in cosines.items()}
    words = ", ".join(f"Signal.{signal.name}: {round(value, 2):.2f}" for signal, value in below.items())
    print(f"\nset in rag/retrieval.py: MIN_SIM = {{{words}}}")
    ratio = {Signal.DENSE: 1.0, Signal.LEXICAL: 5 / 3, Signal.STRUCTURE: 1.1}
    words = ", ".join(f"Signal.{s.name}: {round(value * ratio[s], 2):.2f}" for s, value in below.items())
    held = ", ".join(f"Signal.{signal.name}: {value:.2f}" for signal, value in LEAST_LIKE.items())
    print(f"set in rag/schedules.py: LEAST_LIKE = {{{words}}} (now {{{held}}})")


def least_known(index: Index, queries: list[Description]) -> int:
    """Least number of a query's telling words that occur in a pair other than its own."""
    frequency = index.lexical.frequency
    return min(sum(frequency(word) > 1 for word in known_words(query, index)) for query in queries)


if __name__ == "__main__":
    main()
