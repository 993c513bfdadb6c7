"""Mutants of all pairs before the gate: `python bench/mutants.py --jobs 28 --sample 1 --seconds 450`.

Every pair is checked, then mutated (`kernel_agent.gate.mutants`): `--sample` mutants of each class made on its source
and on the IR of its kernels, and all that are made on gradients. Families come in turn, so that a run that is stopped
has seen all of them. One line per pair is appended to `mutants.jsonl` as soon as it is done, and pairs that stand there
are left out: a run that was stopped goes on. `--survivors` judges anew those pairs of the record of which a mutant
survived, by the gate as it is now; the latest line of a pair counts. `--missing` judges those classes made on source
that a recorded pair lacks, since they were made later, cheapest pairs first, and appends a line with them beside the
old ones. `--again` judges recorded pairs anew that are named, as after a change of their text. `mutants.txt` is the
summary, with survivors and equivalents by name.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import chain, zip_longest
from pathlib import Path

import torch

from kernel_agent.bench.faithful import FaithfulTier
from kernel_agent.data import pairs_root
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate import check
from kernel_agent.gate.mutants.judge import MutantJudge, mutation_report
from kernel_agent.gate.mutants.records import Kind, MutantResult, MutationReport, Outcome
from kernel_agent.gate.mutants.sources import Mutant, sample, source_mutants
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

HERE = Path(__file__).parent
LEAST_SECONDS = 20.0
"""A pair is begun only with so much time left."""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=1, help="mutants per pair and class; 0 is all")
    parser.add_argument("--every", type=int, default=1, help="take every n-th pair only")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pairs", nargs="*", default=[], help="slugs; none: all")
    parser.add_argument("--pair-seconds", type=float, default=180.0, help="of one pair; what is left is counted")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the whole run")
    parser.add_argument("--survivors", action="store_true", help="the recorded pairs with survivors, and no others")
    parser.add_argument("--missing", action="store_true", help="the classes that recorded pairs lack, and no others")
    parser.add_argument("--again", action="store_true", help="the pairs that are named, whether recorded or not")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "mutants.jsonl")
    args = parser.parse_args()
    end = time.time() + args.seconds
    done = {report.pair: report for report in read(args.out)}
    files = [] if args.table else asked(args, done)
    if files:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, context) as pool, args.out.open("a") as log:
            kept = done if args.missing else {}
            futures = {
                pool.submit(judged, path, args.sample, args.pair_seconds, end, kept.get(path.stem)): path
                for path in files
            }
            for future in as_completed(futures):
                _keep(future, futures[future], log)
    text = "\n".join(summary(read(args.out))) + "\n"
    args.out.with_suffix(".txt").write_text(text)
    print(text, end="")


def asked(args: argparse.Namespace, done: Mapping[str, MutationReport]) -> list[Path]:
    """The files of the pairs that the command line means; `done` is the record."""
    chosen = in_turn(args.pairs)[:: args.every]
    if args.survivors:
        return [path for path in chosen if path.stem in done and done[path.stem].survivors]
    if args.missing:
        files = [path for path in chosen if path.stem in done and lacking(path, done[path.stem], args.sample)]
        return sorted(files, key=lambda path: done[path.stem].seconds)
    return chosen if args.again and args.pairs else [path for path in chosen if path.stem not in done]


def in_turn(slugs: Sequence[str]) -> list[Path]:
    """Pair files, one of every family, then the next of every family; of all pairs without `slugs`."""
    families: dict[str, list[Path]] = {}
    for path in sorted(pairs_root().rglob("*.py")):
        if not slugs or path.stem in slugs:
            families.setdefault(path.parent.name, []).append(path)
    return [path for path in chain.from_iterable(zip_longest(*families.values())) if path is not None]


def lacking(path: Path, report: MutationReport, count: int) -> tuple[Mutant, ...]:
    """`count` mutants of each class made on the source of a pair that its record does not know."""
    known = {result.mutator for result in report.results}
    mutants = sample(source_mutants(path.read_text(encoding="utf-8")), count)
    return tuple(mutant for mutant in mutants if mutant.mutator.name not in known)


def judged(
    path: Path, count: int, seconds: float, end: float, known: MutationReport | None = None
) -> MutationReport | str:
    """The mutants of one pair, beside those that are `known`, or why there are none; `end` is on `time.time`."""
    if end - time.time() < LEAST_SECONDS:
        return "no time is left"
    torch.set_num_threads(1)
    start = time.time()
    try:
        with Sandbox() as sandbox:
            truths = Truths(describe(read_file(path), sandbox), sandbox)
            verdict = check(truths.spec, truths.spec.facts.source, sandbox, truths=truths, diagnose=False)
            if not verdict.green:
                return f"the honest backward is {verdict.status.value}: {verdict.message}"
            left = max(1.0, min(start + seconds, end) - time.time())
            if known is not None:
                return completed(truths, known, lacking(path, known, count), left, start)
            report = mutation_report(truths, count=count, rounding=FaithfulTier(truths), seconds=left)
            return report.model_copy(update={"seconds": time.time() - start})
    except KernelAgentError as error:
        return error.message


def completed(
    truths: Truths, known: MutationReport, mutants: Sequence[Mutant], seconds: float, start: float
) -> MutationReport | str:
    """`known` and what becomes of `mutants` beside it; what there was no time for is not called judged."""
    judge = MutantJudge(truths, rounding=FaithfulTier(truths))
    judge.deadline = time.monotonic() + seconds
    results = judge.judged_all(mutants)
    if judge.unjudged:
        return f"{judge.unjudged} of {len(mutants)} mutants were not judged for want of time"
    update = {
        "results": (*known.results, *results),
        "notes": tuple(dict.fromkeys((*known.notes, *judge.notes))),
        "seconds": known.seconds + time.time() - start,
    }
    return known.model_copy(update=update)


def _keep(future: Future[MutationReport | str], path: Path, log: object) -> None:
    try:
        report = future.result()
    except Exception as error:  # one pair that breaks the judge must not lose the others
        report = f"{type(error).__name__}: {error}"
    if isinstance(report, str):
        print(f"{path.stem}: not mutated: {report}", file=sys.stderr, flush=True)
        return
    print(json.dumps(_brief(report)), file=log, flush=True)  # type: ignore[arg-type]
    counts = {outcome.value: count for outcome, count in report.counts.items()}
    print(f"{report.pair}: {counts}, {report.unjudged} unjudged, {report.seconds:.0f} s", file=sys.stderr, flush=True)


def summary(reports: Sequence[MutationReport]) -> Iterator[str]:
    """By class and outcome, the score, the seconds; survivors, equivalents and those that only round, with reasons."""
    results = [result for report in reports for result in report.results]
    counts = Counter(result.outcome for result in results)
    killed, survived = counts[Outcome.KILLED], counts[Outcome.SURVIVED]
    yield f"{len(results)} mutants of {len(reports)} pairs"
    yield f"{'':46}" + "".join(f"{outcome.value:>11}" for outcome in Outcome)
    for name in sorted({result.mutator for result in results}):
        yield f"{name:46}" + _row([result for result in results if result.mutator == name])
    for kind in Kind:
        yield f"{'made on ' + kind.value:46}" + _row([result for result in results if result.kind is kind])
    yield f"{'all':46}" + _row(results)
    yield ""
    yield f"killed of those that are mistakes: {killed} of {killed + survived}"
    yield f"not judged for want of time: {sum(report.unjudged for report in reports)}"
    yield f"seconds of one core: {math.fsum(report.seconds for report in reports):.0f}"
    for outcome, heading in (
        (Outcome.SURVIVED, "survivors"),
        (Outcome.EQUIVALENT, "equivalent"),
        (Outcome.ROUNDING, "rounding, no coarser than allowed"),
    ):
        yield ""
        yield f"{heading}: {counts[outcome]}"
        for report in reports:
            for one in report.of(outcome):
                why = one.reason or f"differs at {one.case}"
                yield f"- {report.pair}: {one.mutator}, {one.mutant}; {why}"
    notes = [f"- {report.pair}: {note}" for report in reports for note in report.notes]
    if notes:
        yield from ("", "notes", *notes)


def table(reports: Sequence[MutationReport]) -> Iterator[str]:
    """What came of all of them, as rows of Markdown."""
    results = [result for report in reports for result in report.results]
    yield (
        f"| {len(results)} mutants of {len(reports)} pairs | " + " | ".join(outcome.value for outcome in Outcome) + " |"
    )
    yield "| --- " * (1 + len(Outcome)) + "|"
    for kind in (*Kind, None):
        counts = Counter(result.outcome for result in results if kind in (result.kind, None))
        name = "all" if kind is None else f"made on {kind.value}"
        yield f"| {' | '.join([name, *(str(counts[outcome]) for outcome in Outcome)])} |"


def _row(results: Sequence[MutantResult]) -> str:
    counts = Counter(result.outcome for result in results)
    return "".join(f"{counts[outcome] or '':>11}" for outcome in Outcome)


def _brief(report: MutationReport) -> object:
    """The record without what a summary does not need: of mutants that died their class, kind and status alone."""

    def short(result: MutantResult) -> MutantResult:
        dead = result.outcome is Outcome.KILLED
        update = {"mutant": "", "case": None, "line": None} if dead else {}
        return result.model_copy(update={**update, "message": "", "seconds": round(result.seconds, 2)})

    brief = report.model_copy(
        update={"results": tuple(map(short, report.results)), "seconds": round(report.seconds, 1)}
    )
    return brief.model_dump(mode="json", exclude_defaults=True)


def read(path: Path) -> list[MutationReport]:
    """The reports of a record, the latest of each pair; none where there is no file."""
    rows = path.read_text().splitlines() if path.exists() else []
    reports = (MutationReport.model_validate_json(row) for row in rows)
    return list({report.pair: report for report in reports}.values())


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
