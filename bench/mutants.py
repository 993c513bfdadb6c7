"""Mutants of all pairs before the exact tier: `python bench/mutants.py --jobs 64 --sample 1`.

Every pair is checked, then mutated (`kernel_agent.gate.mutants`): `--sample` mutants of each class made on its source,
and all that are made on gradients. One line per pair is appended to `mutants.jsonl` as soon as it is done, and pairs
that stand there are left out: a run that was stopped goes on. `mutants.txt` is the summary, survivors by name included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from kernel_agent.data import pairs_root
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate import check
from kernel_agent.gate.mutants.judge import mutation_report
from kernel_agent.gate.mutants.records import MutantResult, MutationReport, Outcome
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

HERE = Path(__file__).parent


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=1, help="mutants per pair and class; 0 is all")
    parser.add_argument("--every", type=int, default=1, help="take every n-th pair only")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pairs", nargs="*", default=[], help="slugs; none: all")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "mutants.jsonl")
    args = parser.parse_args()
    done = _read(args.out)
    wanted = [path for path in sorted(pairs_root().rglob("*.py")) if not args.pairs or path.stem in args.pairs]
    files = [path for path in wanted[:: args.every] if path.stem not in {report.pair for report in done}]
    if files and not args.table:
        with ProcessPoolExecutor(args.jobs) as pool, args.out.open("a") as log:
            futures = {pool.submit(judged, path, args.sample): path for path in files}
            for future in as_completed(futures):
                report = future.result()
                if isinstance(report, str):
                    print(f"{futures[future].stem}: not mutated: {report}", file=sys.stderr, flush=True)
                    continue
                log.write(json.dumps(_brief(report)) + "\n")
                log.flush()
                counts = {outcome.value: count for outcome, count in report.counts.items()}
                print(f"{report.pair}: {counts} in {report.seconds:.0f} s", file=sys.stderr, flush=True)
    text = "\n".join(summary(_read(args.out))) + "\n"
    args.out.with_suffix(".txt").write_text(text)
    print(text, end="")


def judged(path: Path, count: int) -> MutationReport | str:
    """The mutants of one pair, or why there are none."""
    torch.set_num_threads(1)
    try:
        with Sandbox() as sandbox:
            truths = Truths(describe(read_file(path), sandbox), sandbox)
            verdict = check(truths.spec, truths.spec.facts.source, sandbox, truths=truths, diagnose=False)
            if not verdict.green:
                return f"the honest backward is {verdict.status.value}: {verdict.message}"
            return mutation_report(truths, count=count)
    except KernelAgentError as error:
        return error.message


def summary(reports: Sequence[MutationReport]) -> Iterator[str]:
    """By class and outcome, the score, the seconds, and the survivors."""
    results = [result for report in reports for result in report.results]
    counts = Counter(result.outcome for result in results)
    killed, survived = counts[Outcome.KILLED], counts[Outcome.SURVIVED]
    yield f"{len(results)} mutants of {len(reports)} pairs"
    yield f"{'':46}" + "".join(f"{outcome.value:>11}" for outcome in Outcome)
    for name in sorted({result.mutator for result in results}):
        yield f"{name:46}" + _row([result for result in results if result.mutator == name])
    yield f"{'all':46}" + _row(results)
    yield ""
    yield f"killed of those that are mistakes: {killed} of {killed + survived}"
    yield f"seconds of one core: {sum(report.seconds for report in reports):.0f}"
    yield f"survivors: {survived}"
    for report in reports:
        for survivor in report.survivors:
            yield f"- {report.pair}: {survivor.mutator}, {survivor.mutant}; differs at {survivor.case}"


def _row(results: Sequence[MutantResult]) -> str:
    counts = Counter(result.outcome for result in results)
    return "".join(f"{counts[outcome] or '':>11}" for outcome in Outcome)


def _brief(report: MutationReport) -> object:
    """The record without what a summary does not need: messages and the diffs of mutants that died."""
    kept = [result.model_copy(update={"message": "", "seconds": round(result.seconds, 2)}) for result in report.results]
    brief = report.model_copy(update={"results": tuple(kept), "seconds": round(report.seconds, 1)})
    return brief.model_dump(mode="json", exclude_defaults=True)


def _read(path: Path) -> list[MutationReport]:
    rows = path.read_text().splitlines() if path.exists() else []
    return [MutationReport.model_validate_json(row) for row in rows]


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
