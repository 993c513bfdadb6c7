"""Print how retrieval holds up with 100,000 entries: the shipped pairs under strangers' names, built and searched.

    python bench/rag_scale.py [--entries 100000] [--dense] > bench/rag_scale.txt

Each copy of a pair keeps its structure and gets words of its own for what it defines, drawn from 20,000 invented ones,
so that the vocabulary grows as that of many repositories does. `--dense` embeds them too, which takes hours on a CPU;
without it the index serves lexical search and structure, as where no model is installed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import random
import re
import resource
import statistics
import tempfile
import time
from pathlib import Path

from rag_wordings import read_queries

from kernel_agent.data import pairs_root
from rag import Query, load_index, search
from rag.build import add_pairs, build_index
from rag.index import pair_files

WORDS = 20_000
"""Invented words that names are drawn from."""


def words() -> list[str]:
    """Invented words of two to four syllables, the same every time."""
    draw = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    found: set[str] = set()
    while len(found) < WORDS:
        found.add("".join(draw.choices(syllables, k=draw.randint(2, 4))))
    return sorted(found)


def own_names(source: str) -> list[str]:
    """Functions, arguments and variables that a pair defines, but not the three that its format asks for."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    asked = {"META", "SWEEP", "BENCH", "forward", "backward", "make_args", "reference", "surrogate", "saved", "needs"}
    return sorted(name for name in names - asked if not hasattr(builtins, name) and len(name) > 2)


def strange(source: str, known: list[str], draw: random.Random) -> str:
    """The pair with other words for its names. META and the words of the docstring stay."""
    taken = dict(zip(known, draw.sample(VOCABULARY, len(known)), strict=True))
    start = source.index("# --- forward ---")
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, known)) + r")\b")
    return source[:start] + pattern.sub(lambda match: taken[match[0]], source[start:])


def write_copies(folder: Path, entries: int) -> None:
    """So many pair files, in the families of those they are copies of."""
    draw = random.Random(1)
    shipped = [(path, source, own_names(source)) for path, source in pair_files(pairs_root())]
    for number in range(entries):
        path, source, known = shipped[number % len(shipped)]
        place = folder / Path(path).parent / f"{Path(path).stem}_{number}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source if number < len(shipped) else strange(source, known, draw))


def report(entries: int, *, dense: bool) -> None:
    """Build, add one, load, search."""
    with tempfile.TemporaryDirectory() as scratch:
        pairs, index = Path(scratch) / "pairs", Path(scratch) / "index"
        write_copies(pairs, entries)
        print(f"{entries:,} entries, {'with' if dense else 'without'} embeddings, one process:")
        start = time.perf_counter()
        build_index(pairs, index, dense=dense)
        print(f"  built in {time.perf_counter() - start:.0f} s")
        size = sum(file.stat().st_size for file in index.rglob("*") if file.is_file())
        print(f"  {size / 1e6:.0f} MB on disk")
        one = next(pairs.glob("*/*.py"))
        one.write_text(one.read_text() + "\n")
        start = time.perf_counter()
        add_pairs(index, pairs, [one], dense=dense)
        print(f"  one entry changed in {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        loaded = load_index(index)
        queries = read_queries()
        search(Query(queries[0].source), loaded)
        print(f"  loaded, and a first query answered, in {time.perf_counter() - start:.1f} s")
        times, right = [], 0
        for query in queries:
            start = time.perf_counter()
            chosen = search(Query(query.source, k=4), loaded).chosen
            times.append(time.perf_counter() - start)
            right += any(hit.pair.path.parent.name == query.family for hit in chosen)
        print(f"  a query after that: median {statistics.median(times) * 1e3:.0f} ms, most {max(times) * 1e3:.0f} ms")
        print(f"  a pair of the query's family among four: {right / len(queries):.2f} of {len(queries)} queries")
        print(f"  memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")


VOCABULARY = words()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--dense", action="store_true")
    given = parser.parse_args()
    report(given.entries, dense=given.dense)
