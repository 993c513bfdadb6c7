"""Print how well retrieval tells the shipped pairs apart, and the thresholds that follow from it.

Run: python bench/rag_calibration.py [FOLDER OF PAIRS] > bench/rag_calibration.txt

Every pair is a query in turn and is itself taken out. A pair of the same family is what a search should find; a pair of
another family should mostly not be shown. Leave-one-out flatters nothing: pairs of one author share a style, so figures
between families are, if anything, higher than for strangers' files.
"""

from __future__ import annotations

import ast
import builtins
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernel_agent.data import pairs_root
from kernel_agent.pairs.sections import split_sections
from rag import Signal, build_index
from rag.describe import Description, describe
from rag.index import Index
from rag.retrieval import FEW_KNOWN_WORDS, MIN_SIM, dense_cosines, known_words, structure_cosines

Matrix = npt.NDArray[np.float64]


class _Renamed(ast.NodeTransformer):
    """Every own name becomes a word that no index knows, alike wherever it stands."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def _new(self, name: str) -> str:
        if name in ("tl", "triton", "torch") or hasattr(builtins, name):
            return name
        number = len(self.names)
        letters = "".join(chr(ord("a") + number // 26**i % 26) for i in range(3))
        return self.names.setdefault(name, f"zq{letters}x")

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Rename a use."""
        node.id = self._new(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Rename a parameter and keep its annotation."""
        self.generic_visit(node)
        node.arg = self._new(node.arg)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        """Leave keywords of Triton's own functions, such as `mask`, as they are."""
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Rename a definition and drop its docstring."""
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.name = self._new(node.name)
        return node


def renamed(forward: str) -> str:
    """The forward with strangers' names and no docstrings."""
    return ast.unparse(_Renamed().visit(ast.parse(forward)))


def matrix(index: Index, queries: list[Description], of: Callable[[Description, Index], Matrix]) -> Matrix:
    """Cosines of each query with each pair, the query's own pair set to -1: float64 [n, n]."""
    result = np.stack([of(query, index) for query in queries])
    np.fill_diagonal(result, -1.0)
    return result


def fused(*parts: Matrix) -> Matrix:
    """Reciprocal rank fusion of cosines, row by row."""
    ranks = [np.argsort(np.argsort(-part, axis=1, kind="stable"), axis=1) + 1 for part in parts]
    return sum((1.0 / (60 + rank) for rank in ranks), np.zeros(parts[0].shape))


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
    structure = matrix(index, queries, structure_cosines)
    print(f"{len(families)} pairs, {len(set(families))} families, {kin.any(axis=1).sum()} pairs with kin")
    report_hits(kin, dense=dense, lexical=lexical, structure=structure, fused=fused(dense, lexical))
    for signal, scores in ((Signal.DENSE, dense), (Signal.LEXICAL, lexical), (Signal.STRUCTURE, structure)):
        report_threshold(signal, scores, kin)

    known = [len(known_words(query, index)) for query in strange]
    print(f"\ntelling words known from other pairs: at least {least_known(index, queries)}; with every name renamed at")
    print(f"  most {max(known)}; structure ranks below {FEW_KNOWN_WORDS}")
    print("every name renamed and no docstring:")
    dense = matrix(index, strange, dense_cosines)
    lexical = matrix(index, strange, lambda query, index: index.lexical.cosines(query.terms))
    report_hits(kin, dense=dense, lexical=lexical, structure=structure, fused=fused(structure, lexical))


def least_known(index: Index, queries: list[Description]) -> int:
    """Least number of a query's telling words that occur in a pair other than its own."""
    frequency = index.lexical.frequency
    return min(sum(frequency(word) > 1 for word in known_words(query, index)) for query in queries)


if __name__ == "__main__":
    main()
