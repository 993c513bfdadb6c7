"""Whether anything that a model may reply ends in a verdict, in time, and leaves nothing behind.

    python bench/fuzz.py --replies 10000 --candidates 200 --seed 0 > bench/fuzz.txt

Replies go the way that a run takes them: kept on disk, read as a plan, code or edits taken out, put together with the
forward, read by the gate as far as nothing runs. Candidates that misbehave go through the whole gate.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fuzzed_candidates import CANDIDATES
from fuzzed_replies import BACKWARD, REPLIES
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from leftovers import Left, left_since, own_temporary_folder, take_inventory

from kernel_agent.agent.attempts import change_of
from kernel_agent.agent.edits import EditProblem
from kernel_agent.agent.reflection import read_plan
from kernel_agent.agent.reply import extract
from kernel_agent.agent.snapshots import Snapshots
from kernel_agent.agent.splice import Piece, splice
from kernel_agent.errors import InputError
from kernel_agent.gate import GateOptions, Verdict, check
from kernel_agent.gate.candidate import read_candidate
from kernel_agent.gate.kernels_alone import kernels_alone
from kernel_agent.gate.recomputed import default_pair
from kernel_agent.gate.verdict import Status
from kernel_agent.models.exchange import Exchange
from kernel_agent.models.protocol import Reply
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.assemble import assemble, generated_forward
from kernel_agent.pairs.sections import BACKWARD_MARKER, CHECK_MARKER
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Limits, Sandbox

TESTS = Path(__file__).resolve().parents[1] / "test"
LIMITS = Limits(wall_s=2.0, memory_bytes=1 << 30, file_bytes=64 << 20, processes=16, threads=64)
QUICK = GateOptions(seeds=(0,), odd_sizes=0, max_cases=1, values=(), limits=LIMITS)
JOBS = 3
"""Processes that a check starts at most: two for the candidate, one that carries its record out again."""
GRACE_S = 20.0
"""Of a check, beside what the limits allow: the end of what was started, on a machine that does other work too."""
SLOWEST_REPLY_S = 10.0
_AT_A_TIME = 500
EDITS_REFUSED = "edits refused"
TO_THE_SANDBOX = "to the sandbox"


def way_of_a_reply(text: str, spec: KernelSpec, folder: Path) -> str:
    """What comes of a reply before anything of it runs: a status, or one of the two other ends. Raises on a defect."""
    reply = Reply(text=text, model="fuzz")
    exchange = Exchange(folder)
    exchange.reply_path(1).unlink(missing_ok=True)
    exchange.write_reply(1, reply)
    exchange.read_reply(1, model="fuzz")
    reply.model_dump_json()
    change_of(reply.text)
    read_plan(reply.text, spec, ())
    shown = Candidate(backward=BACKWARD)
    try:
        found = extract(reply.text, given_forward=generated_forward(spec), freeze_forward=False, shown=shown)
    except EditProblem as problem:
        problem.message.encode()
        return EDITS_REFUSED
    if found.candidate is None:
        assert found.refusal is not None
        assert not found.refusal.green
        found.refusal.model_dump_json()
        return found.refusal.status.value
    return _read(found.candidate, spec, Snapshots(folder / "snapshots"))


def _read(candidate: Candidate, spec: KernelSpec, snapshots: Snapshots) -> str:
    digest = snapshots.put(candidate)
    kept = snapshots.get(digest)
    snapshots.path(digest).unlink()
    source = assemble(spec, kept)
    try:
        read = read_candidate(spec, source)
    except InputError:
        return Status.BAD_FORMAT.value
    if read.problem is not None:
        return read.problem.status.value
    kernels_alone(source, default_pair(spec))
    mine, other = Piece(kept, frozenset(spec.grads[:1])), Piece(Candidate(backward=BACKWARD), frozenset(spec.grads[1:]))
    for pieces in ((mine, other), (other, mine)):
        with contextlib.suppress(InputError):  # a section that is Python only below the forward; the loop takes no two
            splice(*pieces, grads=spec.grads, cotangents=("grad_y",))
    return TO_THE_SANDBOX


class Gate:
    """The whole gate for backward sections of one pair, with tight limits."""

    def __init__(self, sandbox: Sandbox, pair: Path = TESTS / "gate/pairs/rmsnorm.py") -> None:
        self.sandbox = sandbox
        self._truths = Truths(describe(read_file(pair), sandbox), sandbox)
        self._head, rest = pair.read_text().split(BACKWARD_MARKER)
        self._kernels, self._check = rest.split("def backward")[0], rest.split(CHECK_MARKER)[1]
        self.judge("def backward(saved, g):\n    return by_kernel(saved, g)\n")  # the truth is known from here on

    def judge(self, section: str) -> Verdict:
        """The verdict on a section below the honest kernels."""
        parts = (self._head, BACKWARD_MARKER, self._kernels, section, f"\n\n{CHECK_MARKER}", self._check)
        return check(self._truths.spec, "".join(parts), self.sandbox, QUICK, truths=self._truths, diagnose=False)


@dataclass
class Tally:
    """What came of many examples."""

    name: str
    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    defects: list[str] = field(default_factory=list)

    def run(self, example: str, way: Callable[[str], str]) -> None:
        """Send one example its way. An exception is a defect of ours, whatever the example was."""
        start = time.perf_counter()
        try:
            end = way(example)
        except Exception:
            end = "DEFECT"
            self.defects.append(f"{traceback.format_exc(limit=-3)}\nof {example[:500]!r}")
        self.ends[end] += 1
        self.slowest_s = max(self.slowest_s, time.perf_counter() - start)

    def table(self, left: Left, seconds: float) -> str:
        """As text."""
        rows = [f"  {name:<24}{count:>7}" for name, count in self.ends.most_common()]
        head = f"{self.name}: {sum(self.ends.values())} examples in {seconds:.0f} s, the slowest {self.slowest_s:.2f} s"
        tail = (
            f"  left behind: {len(left.processes)} processes, {len(left.files)} files, {max(0, left.descriptors)} open "
            f"descriptors; memory of this process and the server {left.memory_bytes / (1 << 20):+.0f} MiB"
        )
        return "\n".join([head, *rows, tail])


def drawn(strategy: st.SearchStrategy[str], count: int, number: int, use: Callable[[str], None]) -> None:
    """Draw so many examples, the same for the same number; few at a time, as Hypothesis remembers all of them."""
    for begun in range(0, count, _AT_A_TIME):

        @seed(number + begun)
        @settings(
            max_examples=min(_AT_A_TIME, count - begun),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(strategy)
        def each(example: str) -> None:
            use(example)

        each()


def main() -> int:
    """Run both and print the tables; 1 for a defect, or for anything left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replies", type=int, default=10_000)
    parser.add_argument("--candidates", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(f"python bench/fuzz.py --replies {asked.replies} --candidates {asked.candidates} --seed {asked.seed}")
    print(f"Python {platform.python_version()} on {platform.machine()}\n")
    bad = False
    with own_temporary_folder() as folder, Sandbox() as sandbox:
        gate = Gate(sandbox)
        spec = describe(read_file(TESTS / "agent/forwards/product.py"), sandbox)
        run = folder / "run"
        ways: list[tuple[Tally, st.SearchStrategy[str], int, Callable[[str], str]]] = [
            (Tally("Replies"), REPLIES, asked.replies, lambda text: way_of_a_reply(text, spec, run)),
            (Tally("Candidates"), CANDIDATES, asked.candidates, lambda text: gate.judge(text).status.value),
        ]
        for tally, strategy, count, way in ways:
            tally.run("", way)  # what is loaded once is no leftover
            before, start = take_inventory(sandbox.server_pid, kept=run), time.monotonic()
            drawn(strategy, count, asked.seed, lambda text, tally=tally, way=way: tally.run(text, way))  # type: ignore[misc]
            left = left_since(before, sandbox.server_pid, kept=run)
            print(tally.table(left, time.monotonic() - start), *tally.defects, sep="\n", end="\n\n", flush=True)
            bad = bad or bool(tally.defects) or not left.nothing
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
