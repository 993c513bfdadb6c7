"""`tune`: a proven derived backward with the numbers that make it fastest, proven again.

The order of things: tiles that may not change are found by the gate, the native tier judges the backward as it is, a
search times variants, each part of the backward gets its best numbers per shape class, and the pair with all of them
goes through the gate and the native tier and is timed beside the one before it. What comes out is green and faster, or
the pair as it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kernel_agent.bench.measure import measure_source
from kernel_agent.bench.native import check_native
from kernel_agent.bench.records import decide
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.bench.tunable import TunableKind
from kernel_agent.bench.variants import Space
from kernel_agent.compiler.tuning.classes import Class, classes
from kernel_agent.compiler.tuning.on_gpu import OnGpu
from kernel_agent.compiler.tuning.pins import names_before, pinned
from kernel_agent.compiler.tuning.search import Found, search
from kernel_agent.compiler.tuning.space import LEAST_DOT_TILE, space
from kernel_agent.gate import check
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.verdict import Verdict
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.assemble import candidate_from_pair
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry
from kernel_agent.pairs.userfile import read_source
from kernel_agent.sandbox import Sandbox

SMALL = GateOptions(seeds=(0,), max_elements=1 << 14, max_volume=1 << 20, odd_sizes=1, max_cases=4)
"""Of the check that tells whether tiles may change: every required entry once, in tiles of its own size or less."""
TIMING = BenchOptions(budget_s=0.1, baselines=False, bounds=False, proof_elements=1 << 24)
BATCH = 0.5
"""Share of the seconds of a search for compiling and timing one batch."""
LEAST_GAIN = 0.01
SECONDS = 150.0
"""For all of it, by default."""
LEAST_SEARCH = 10.0
"""Seconds that a search needs for a few variants: with less left, nothing is searched."""
NATIVE_TWICE = 2.0
"""What was chosen is judged natively, and two backwards are timed: that takes as long as the first judgement twice."""

OnLine = Callable[[str], None]
"""Told what is being done."""


@dataclass(frozen=True)
class Tuned:
    """What came of tuning one pair."""

    pair: str
    """The whole file; as it was where nothing is faster."""
    changed: bool
    line: str
    """What was chosen and what it brought."""
    tried: int = 0
    verdict: Verdict | None = None
    """Of the gate, where the text is another."""
    problems: tuple[str, ...] = ()
    """Why variants were not timed."""
    seconds: float = 0.0
    refused: str = ""
    """What the native tier says of the pair as it was, where it is not green."""


def tuning_entries(spec: KernelSpec) -> tuple[ShapeEntry, ...]:
    """BENCH, where the file has one, else the required entries of SWEEP, else all."""
    return spec.facts.bench or tuple(one for one in spec.sweep if one.required) or spec.sweep


def at_entries(spec: KernelSpec, pair: str, entries: tuple[ShapeEntry, ...]) -> KernelSpec:
    """The spec of a pair with another text of the same functions, and other entries of SWEEP."""
    source = f"{pair.rstrip()}\n\n\nSWEEP = {[entry.dims for entry in entries]!r}\n"
    facts = read_source(pair, spec.facts.path).model_copy(update={"source": source})
    return spec.model_copy(update={"facts": facts, "sweep": entries})


def tune(
    spec: KernelSpec,
    pair: str,
    sandbox: Sandbox,
    *,
    seconds: float = SECONDS,
    proof_s: float | None = None,
    entries: tuple[ShapeEntry, ...] = (),
    fixed: frozenset[int] | None = None,
    prove: bool = True,
    on_line: OnLine = lambda _: None,
    truths: Truths | None = None,
) -> Tuned:
    """Tune a pair that the gate accepts, on this machine's GPU.

    `entries`: shapes to tune for; by default those of BENCH, or the required ones of SWEEP. `seconds`: for all of it;
    the search has what the judgement before it leaves, but for what proving will take. `proof_s`: what the gate takes
    for this pair; where nobody says, and it is asked here, as long as the native tier. `fixed`: what `fixed_tiles` said
    before; asked here by default. Without `prove`, it is the caller who has both tiers judge what was chosen, and times
    it. Raises `EnvironmentProblem` where there is no GPU or the forward does not run on it.
    """
    start = time.perf_counter()
    until = time.monotonic() + seconds
    entries = entries or tuning_entries(spec)
    inside = space(candidate_from_pair(pair))
    if not inside.tunables:
        return Tuned(pair, False, "nothing in it can be tuned")
    of_pair = describe(read_source(pair, spec.facts.path), sandbox)
    at_sizes = at_entries(of_pair, pair, entries)
    rig = Rig(at_sizes, sandbox, TIMING)
    on_line("the native tier judges the backward as it is")
    native = check_native(at_sizes, at_sizes.facts.source, sandbox, rig)
    if not native.green:
        said = f"the native tier says {native.status.value}: {native.message}"
        return Tuned(pair, False, f"not tuned: {said}", refused=said)
    native_s = time.perf_counter() - start
    if prove or proof_s is not None:
        until -= NATIVE_TWICE * native_s + (native_s if proof_s is None else proof_s)
    truths = truths or Truths(spec, sandbox)
    if fixed is None:
        on_line("which tiles may have another size")
        fixed = fixed_tiles(spec, pair, sandbox, truths, until=until - LEAST_SEARCH)
    left = until - time.monotonic()
    if left < LEAST_SEARCH:
        spent = time.perf_counter() - start
        line = f"not tuned: after {spent:.0f} of {seconds:.0f} s the rest is what proving takes; give it more --seconds"
        return Tuned(pair, False, line, seconds=spent)
    entries_in = [one.entry for one in rig.inputs]
    judge = OnGpu(at_sizes.facts.source, entries_in, rig, BATCH * left, on_line, until=until)
    on_line(f"timing variants for {left:.0f} s at most")
    found = search(inside, judge, seconds=left, dropped=fixed)
    chosen = chosen_of(inside, found)
    if all(not one.values for some in chosen for one in some):
        return Tuned(pair, False, f"none of {found.tried} variants is faster", found.tried, problems=found.problems)
    text = with_backward(pair, pinned(inside, chosen, f"The fastest on {_article(rig.gpu.name)}.").backward)
    if not prove:
        line = f"not proven yet, {_gain(found):.1%} less time of its kernels when they were searched"
        return Tuned(text, True, line, found.tried, problems=found.problems, seconds=time.perf_counter() - start)
    on_line("proving what was chosen")
    verdict = check(spec, text, sandbox, truths=truths, diagnose=False)
    if not verdict.green:
        return Tuned(pair, False, f"what is fastest is {verdict.status.value}: {verdict.message}", found.tried)
    whole = at_entries(of_pair, text, entries)
    native = check_native(whole, whole.facts.source, sandbox, rig)
    if not native.green:
        return Tuned(pair, False, f"what is fastest is {native.status.value} on the GPU: {native.message}", found.tried)
    before = measure_source(at_sizes, at_sizes.facts.source, sandbox, rig)
    decision = decide(before, measure_source(whole, whole.facts.source, sandbox, rig), LEAST_GAIN)
    line = f"{decision.line}, after {found.tried} variants"
    if not decision.kept:
        return Tuned(pair, False, line, found.tried, problems=found.problems)
    return Tuned(text, True, line, found.tried, verdict, found.problems, time.perf_counter() - start)


def _gain(found: Found) -> float:
    """Relative time that the best numbers of each part save together, at the entries of each."""
    parts = [part for part in found.parts if part.labels]
    before = sum(part.mean(frozenset(), part.labels) for part in parts)
    after = sum(part.mean(part.best(part.labels), part.labels) for part in parts)
    return 1.0 - after / before


def chosen_of(inside: Space, found: Found) -> list[tuple[Class, ...]]:
    """The classes of every part that has times."""
    return [classes(part, found.sizes, names_before(inside, part.places)) for part in found.parts if part.labels]


def fixed_tiles(
    spec: KernelSpec, pair: str, sandbox: Sandbox, truths: Truths | None = None, *, until: float = math.inf
) -> frozenset[int]:
    """Places of tiles that the backward is wrong with if they are small.

    What a backward reads may lie in memory by the forward's tiles, and a tile may be more than one: the width of a
    window, a row as a whole. At sizes of the gate, a small tile shows that. Those of which it is not known at `until`,
    by `time.monotonic`, are told too: they stay as they are.
    """
    inside, truths = space(candidate_from_pair(pair)), truths or Truths(spec, sandbox)
    smaller = {
        place: LEAST_DOT_TILE
        for place, tunable in enumerate(inside.tunables)
        if tunable.kind is TunableKind.BLOCK and tunable.value > LEAST_DOT_TILE
    }

    def right(places: dict[int, int]) -> bool:
        if time.monotonic() > until:
            return False
        text = with_backward(pair, inside.variant(places).backward)
        return check(spec, text, sandbox, SMALL, truths=truths, diagnose=False).green

    rest = frozenset(
        place
        for place, tunable in enumerate(inside.tunables)
        if tunable.kind is TunableKind.BLOCK and place not in smaller
    )
    if not smaller or right(smaller):
        return rest
    if len(smaller) == 1:
        return rest | frozenset(smaller)
    return rest | frozenset(place for place, least in smaller.items() if not right({place: least}))


def with_backward(pair: str, backward: str) -> str:
    """A pair file with another backward section."""
    sections = split_sections(pair)
    space_below = sections.backward[len(sections.backward.rstrip()) :]
    return replace(sections, backward=backward.rstrip() + space_below).join()


def _article(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIO" else f"a {name}"
