"""How well modelled times order backwards, compared with times measured on the GPU of this machine.

For pairs of the dataset at the first entry of their BENCH: their backward, and variants of it with another block size,
number of warps or stages, are timed (CUDA events, L2 flushed, median, by `triton.testing.do_bench`) and modelled for
the same GPU. Prints per pair the rank correlation and the share of couples in the right order among those that measure
more than 10 % apart, and over all the ratio of modelled to measured. Also measures two constants of the model: what a
kernel costs that does nothing, and the share of the stated bandwidth that a copy reaches. Variants are not gated here:
they do what their text says.

    python bench/modelled_accuracy.py [--variants N] [--only TEXT] [--json FILE]     on a machine with a GPU
    python bench/modelled_accuracy.py --model-only                                   anywhere: modelled times alone
    python bench/modelled_accuracy.py --summary bench/modelled_accuracy.json         what committed figures say
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_agent.bench.modelled import NotModelled, entry_facts, modelled
from kernel_agent.bench.variants import Space
from kernel_agent.oracle import describe
from kernel_agent.pairs.assemble import assemble, candidate_from_pair
from kernel_agent.pairs.spec import Candidate, KernelSpec, ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).parents[1]
PAIRS = ROOT / "datasets" / "kernel_pairs"
APART = 0.1
"""Couples that measure less than this apart are not asked for their order."""

TIMED = (
    "activation/gelu_erf",
    "activation/squared_relu_bias",
    "attention/fa2_causal",
    "attention/fa_onekernel_dq_atomic",
    "attention_special/sigmoid_attention",
    "gather_scatter/embedding_atomic",
    "gather_scatter/embedding_sorted_segment",
    "glu/swiglu_packed",
    "linear_attention/linattn_causal_chunk",
    "linear_attention/rwkv6_recurrent",
    "loss_ce/ce_row",
    "loss_other/huber_smooth_l1",
    "low_rank/lora_linear",
    "matmul/matmul_bias_gelu",
    "matmul/matmul_nt",
    "matmul/matmul_splitk_dw",
    "norm_channel/batchnorm_train_2d",
    "norm_fused/add_rmsnorm",
    "norm_row/layernorm_persistent",
    "norm_row/layernorm_row",
    "norm_row/rmsnorm_row",
    "reduction_stat/cumsum_rows",
    "reduction_stat/pairwise_dist_l2",
    "softmax/log_softmax",
    "softmax/softmax_online",
    "softmax/softmax_row",
    "ssm_rnn/scan_first_order",
    "ssm_rnn/selective_scan_recompute",
)
"""Pairs that are timed, at the first entry of their BENCH."""


@dataclass(frozen=True)
class Timed:
    """One backward."""

    case: str
    change: str
    """What differs from the pair's own backward; `as it is` for that."""
    modelled_us: float | None
    bound_by: str
    """What the model says the slowest kernel is bound by."""
    measured_us: float | None
    problem: str = ""


def variants(candidate: Candidate, limit: int) -> list[tuple[str, Candidate]]:
    """The candidate itself, and its neighbours along every coordinate, those of the first coordinates first."""
    space = Space.of(candidate)
    found = [("as it is", candidate)]
    for step in (1, -1):
        for place, tunable in enumerate(space.tunables):
            value = tunable.beside(tunable.value, step)
            if value is not None:
                found.append((tunable.said(value), space.variant({place: value})))
    return found[: 1 + limit]


def model(spec: KernelSpec, candidate: Candidate, sandbox: Sandbox, device: str) -> tuple[float | None, str]:
    """Modelled microseconds and what bounds the slowest kernel, or why there are none."""
    try:
        measurement = modelled(spec, candidate, sandbox, device)
    except NotModelled as error:
        return None, error.message
    slowest = max(measurement.kernels, key=lambda kernel: kernel.microseconds)
    return measurement.geomean_us, slowest.bound_by


def facts_of(spec: KernelSpec, candidate: Candidate, sandbox: Sandbox, device: str) -> list[Any]:
    """What the model is made from, as JSON; empty where there is none."""
    try:
        entries = entry_facts(spec, assemble(spec, candidate), sandbox, device, spec.sweep)
    except NotModelled:
        return []
    return [entry.model_dump(mode="json") for entry in entries]


def measure_here(path: Path, entry: ShapeEntry, *, timed: bool) -> float:
    """Median microseconds of one backward on this GPU; without `timed`, it is run once. The file runs as it is."""
    import torch
    import triton

    from kernel_agent.ir import import_module
    from kernel_agent.pairs.arguments import build_arguments

    module = import_module(path, path.stem)
    arguments = build_arguments(module, entry, device="cuda", seed=0)
    outputs, saved = module.forward(*arguments.args, **arguments.kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    floating = [isinstance(out, torch.Tensor) and out.is_floating_point() for out in outputs]
    cotangents = [torch.randn_like(out) if yes else None for out, yes in zip(outputs, floating, strict=True)]
    module.backward(saved, *cotangents)
    torch.cuda.synchronize()
    if not timed:
        return 0.0
    return 1e3 * triton.testing.do_bench(
        lambda: module.backward(saved, *cotangents), warmup=10, rep=50, return_mode="median"
    )


def time_jobs(folder: Path, places: range, *, timed: bool) -> None:
    """Time the files of a folder and print one line of JSON for each. Ends when the GPU does not survive one."""
    import torch

    entries = json.loads((folder / "entries.json").read_text())
    for place in places:
        answer: dict[str, Any] = {"place": place}
        try:
            entry = ShapeEntry(dims=entries[place])
            answer["us"] = measure_here(folder / f"pair_{place}.py", entry, timed=timed)
        except Exception as error:  # whatever a variant does
            answer["problem"] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(answer), flush=True)
        torch.cuda.synchronize()  # raises, and ends this process, when the context is lost


def measured(folder: Path, count: int, workers: int) -> dict[int, dict[str, Any]]:
    """Answers of `time_jobs` by place. Everything is compiled first, many at a time; then each is timed alone."""
    words = [sys.executable, __file__, "--time", str(folder)]
    warm = [
        subprocess.Popen([*words, "--places", f"{k} {count} {workers} 0"], stdout=subprocess.DEVNULL)
        for k in range(workers)
    ]
    for process in warm:
        process.wait()
    found: dict[int, dict[str, Any]] = {}
    place = 0
    while place < count:
        done = subprocess.run(
            [*words, "--places", f"{place} {count} 1 1"], stdout=subprocess.PIPE, text=True, check=False
        )
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found.update({answer["place"]: answer for answer in answers})
        place = max((answer["place"] for answer in answers), default=place - 1) + 1
        if done.returncode and place < count and place not in found:
            found.setdefault(place, {"problem": "the process ends"})
            place += not answers
    return found


def constants(bandwidth_gb_s: float) -> dict[str, float]:
    """Two constants of the model on this GPU: START_S in microseconds, ACHIEVED."""
    import torch
    import triton

    small = torch.zeros(1, device="cuda")
    rounds = 200

    def many() -> None:
        for _ in range(rounds):
            small.fill_(0.0)

    graph = torch.cuda.CUDAGraph()
    many()
    with torch.cuda.graph(graph):
        many()
    start_us = 1e3 * triton.testing.do_bench(graph.replay, warmup=10, rep=50, return_mode="median") / rounds
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy_s = 1e-3 * triton.testing.do_bench(lambda: target.copy_(source), warmup=10, rep=100, return_mode="median")
    return {"start_us": start_us, "achieved": 2 * source.nbytes / copy_s / (bandwidth_gb_s * 1e9)}


def ranks(values: list[float]) -> list[float]:
    """Ranks from 0, equal values sharing their mean."""
    return [sum(v < value for v in values) + (values.count(value) - 1) / 2 for value in values]


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's; NaN where either is constant."""
    a, b = ranks(one), ranks(other)
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return statistics.correlation(a, b)


def ordered(rows: list[Timed]) -> tuple[int, int]:
    """Couples in the right order, and couples that measure apart. A tie of the model counts as wrong."""
    right = total = 0
    for place, one in enumerate(rows):
        for other in rows[place + 1 :]:
            low, high = sorted((one.measured_us, other.measured_us))
            if high > low * (1 + APART):
                total += 1
                right += (one.modelled_us < other.modelled_us) == (one.measured_us < other.measured_us) and (
                    one.modelled_us != other.modelled_us
                )
    return right, total


def summary(rows: list[Timed]) -> list[str]:
    """Lines for people."""
    lines, rights, totals, found = [], 0, 0, []
    both = [row for row in rows if row.modelled_us is not None and row.measured_us is not None]
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in both if row.case == case]
        if len(mine) < 2:
            lines.append(f"{case}: fewer than two timed")
            continue
        right, total = ordered(mine)
        rights, totals = rights + right, totals + total
        correlation = rank_correlation([r.modelled_us for r in mine], [r.measured_us for r in mine])
        found.append(correlation)
        own = mine[0]
        lines.append(
            f"{case}: {own.measured_us:.1f} us measured, {own.modelled_us:.1f} modelled ({own.bound_by}); "
            f"{len(mine)} variants, rank correlation {correlation:.2f}, {right} of {total} couples in order"
        )
    known = [value for value in found if not math.isnan(value)]
    own = [row for row in both if row.change == "as it is"]
    if len(known) > 1 and len(own) > 2:
        between = rank_correlation([row.modelled_us for row in own], [row.measured_us for row in own])
        ratios = statistics.quantiles([row.modelled_us / row.measured_us for row in both], n=4)
        lines += [
            f"within a pair: median rank correlation {statistics.median(known):.2f} over {len(known)} pairs; {rights} "
            f"of {totals} couples more than {APART:.0%} apart are in the right order ({rights / max(totals, 1):.0%})",
            f"between pairs: rank correlation {between:.2f} over {len(own)} pairs",
            "modelled over measured: quartiles " + ", ".join(f"{ratio:.2f}" for ratio in ratios),
        ]
    return lines


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Model everything, then measure everything, so that nothing else runs beside a clock."""
    device, measured_constants = options.device, {}
    if not options.model_only:
        import torch

        from kernel_agent.ir.cost.devices import device_table

        found = device_table().find(torch.cuda.get_device_name())
        device, measured_constants = found.name, constants(found.bandwidth_gb_s)
        print(f"{device}: {measured_constants}", flush=True)
    jobs: list[tuple[str, ShapeEntry, KernelSpec, str, Candidate]] = []
    with Sandbox() as sandbox, ThreadPoolExecutor(options.workers) as pool:
        for name in TIMED:
            if options.only and options.only not in name:
                continue
            path = PAIRS / f"{name}.py"
            facts = read_file(path)
            entry = facts.bench[0]
            spec = describe(facts, sandbox).model_copy(update={"sweep": (entry,)})
            own = candidate_from_pair(path.read_text())
            jobs += [(name, entry, spec, change, one) for change, one in variants(own, options.variants)]
        models = list(pool.map(lambda job: model(job[2], job[4], sandbox, device), jobs))
        if options.facts:
            forms = [facts_of(spec, one, sandbox, device) for _, _, spec, _, one in jobs]
            options.facts.write_text(json.dumps(forms))
    answers: dict[int, dict[str, Any]] = {}
    if not options.model_only:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "entries.json").write_text(json.dumps([job[1].dims for job in jobs]))
            for place, (_, _, spec, _, one) in enumerate(jobs):
                (Path(folder) / f"pair_{place}.py").write_text(assemble(spec, one))
            answers = measured(Path(folder), len(jobs), options.workers)
    rows = []
    for place, ((name, _, _, change, _), (modelled_us, by)) in enumerate(zip(jobs, models, strict=True)):
        answer = answers.get(place, {})
        problem = by if modelled_us is None else answer.get("problem", "")
        rows.append(Timed(name, change, modelled_us, "" if modelled_us is None else by, answer.get("us"), problem))
    return {"device": device, "constants": measured_constants, "rows": [asdict(row) for row in rows]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=6, help="per pair, besides its own backward")
    parser.add_argument("--only", default="", help="pairs whose name holds this")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--workers", type=int, default=8, help="children that model at the same time")
    parser.add_argument("--model-only", action="store_true")
    parser.add_argument("--device", default="H100 SXM", help="with --model-only: the GPU to model")
    parser.add_argument("--summary", type=Path, help="print the summary of a file of figures, and end")
    parser.add_argument("--time", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--places", help=argparse.SUPPRESS)
    parser.add_argument("--facts", type=Path, help="where the counts behind the modelled times go, too")
    options = parser.parse_args()
    if options.time:
        first, count, step, timed = (int(word) for word in options.places.split())
        time_jobs(options.time, range(first, count, step), timed=bool(timed))
        return
    if options.summary:
        print("\n".join(summary([Timed(**row) for row in json.loads(options.summary.read_text())["rows"]])))
        return
    found = run(options)
    print("\n".join(summary([Timed(**row) for row in found["rows"]])))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
