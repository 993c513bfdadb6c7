"""Derived attention beside FlashAttention-2 and cuDNN while a GPU has its full clock, and once at its power limit.

    python bench/attention_turns.py measure --pairs FOLDER          # on a GPU; FOLDER is of `backward_speed.py derive`
    python bench/attention_turns.py show

At the largest shape a GPU reaches its power limit within a few dozen backwards and lowers its clock, so that a ratio
hangs on how many were timed and on what ran before. Here all contenders take turns: bursts of a few backwards, each
after a rest, and a run of seconds whose second half counts. The native tier judges the pair first.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from backward_speed import CASES, OPTIONS, ROOT, Case, at_case
from flash import backwards
from torch.nn.attention import SDPBackend

from kernel_agent.bench.native import check_native
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.errors import InputError
from kernel_agent.sandbox import Sandbox

RIVALS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ROUNDS, BURST, REST_S, STEADY_S = 5, 4, 1.0, 1.5
OUT = ROOT / "bench" / "attention_turns.json"

Work = Callable[[], object]


def call_times(work: Work, calls: int) -> list[float]:
    """Microseconds of so many backwards, one right after the other: inputs are larger than any cache."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) * 1e3 for first, last in itertools.pairwise(events)]


def burst(work: Work) -> float:
    """The median of a few backwards after a rest."""
    time.sleep(REST_S)
    return statistics.median(call_times(work, BURST))


def steady(work: Work, us: float) -> float:
    """The median of the second half of a long run, of a backward that takes about `us`."""
    time.sleep(REST_S)
    times = call_times(work, int(STEADY_S * 1e6 / us))
    return statistics.median(times[len(times) // 2 :])


def derived(path: Path, entry: dict[str, Any]) -> Work:
    """The backward of a pair file at an entry of its SWEEP."""
    found = importlib.util.spec_from_file_location("derived_attention", path)
    if found is None or found.loader is None:
        raise InputError(f"{path} is no Python file", remedy="Write it by `python bench/backward_speed.py derive`.")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    args = module.make_args(**entry, device="cuda")
    outputs, saved = module.forward(*args)
    cotangent = torch.randn_like(outputs[0])
    return lambda: module.backward(saved, cotangent, None)


def contenders(path: Path, entry: dict[str, Any]) -> Iterator[tuple[str, Work]]:
    """Everyone who computes the backward at an entry, each inputs' layout on its own."""
    yield "derived", derived(path, entry)
    for name, backend in RIVALS.items():
        for work in backwards(entry, backend):
            yield name, work


def turns(path: Path, entry: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By contender what a backward takes in bursts and in a long run: of the layout that is faster in bursts."""
    works = list(contenders(path, entry))
    for _, work in works:
        call_times(work, BURST)
    rounds = [[burst(work) for _, work in works] for _ in range(ROUNDS)]
    bursts = [statistics.median(times) for times in zip(*rounds, strict=True)]
    found: dict[str, dict[str, float]] = {}
    for (name, work), us in sorted(zip(works, bursts, strict=True), key=lambda one: one[1]):
        if name not in found:
            found[name] = {"burst_us": round(us, 1), "steady_us": round(steady(work, us), 1)}
    return found


def measure(folder: Path, out: Path) -> None:
    """Judge the pair, let all take turns, and write the rows."""
    (case,) = (case for case in CASES if case.flash)
    path = folder / f"{case.name}.py"
    green = judged(case, path)
    rows = []
    for entry in case.entries if green else ():
        rows.append({"entry": " ".join(f"{name}={value}" for name, value in entry.items()), **turns(path, entry)})
        print(rows[-1], flush=True)
    written = {"device": torch.cuda.get_device_name(), "green": green, "rows": rows}
    out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def judged(case: Case, path: Path) -> bool:
    """Whether the native tier finds a pair green at the entries of its case."""
    with Sandbox() as sandbox:
        spec = at_case(case, path, sandbox)
        rig = Rig(spec, sandbox, BenchOptions(proof_elements=OPTIONS.proof_elements))
        verdict = check_native(spec, spec.facts.source, sandbox, rig)
    print(f"native tier {verdict.status.value}: {verdict.message}", flush=True)
    return verdict.green


def show(out: Path) -> None:
    """Print the table of what was measured."""
    written = json.loads(out.read_text(encoding="utf-8"))
    verdict = "GREEN" if written["green"] else "not green"
    print(f"{written['device']}; native tier {verdict}; backwards in microseconds\n")
    print(f"{'':52} {f'bursts of {BURST}':^35} {f'the second half of {STEADY_S} s':^35}")
    print(f"{'attention':52}" + 2 * f" {'derived':>9} {'x flash':>12} {'x cudnn':>12}")
    for row in written["rows"]:
        line = f"{re.sub(' dtype=', ' ', row['entry']):52}"
        for way in ("burst_us", "steady_us"):
            own = row["derived"][way]
            line += f" {own:9.1f}" + "".join(
                f" {row[name][way] / own:12.2f}" if name in row else f"{'-':>13}" for name in RIVALS
            )
        print(line)


def main() -> None:
    """Measure or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "show"))
    parser.add_argument("--pairs", type=Path, default=Path("generated/derived"))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.pairs, options.out)
    else:
        show(options.out)


if __name__ == "__main__":
    main()
