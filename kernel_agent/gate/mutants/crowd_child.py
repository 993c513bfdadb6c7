"""What runs in the child that mutants share: each on one case after the other, until its answer is not the honest one.

No truth is near, as in `gate.child`. The honest backward runs first; what a mutant answers travels only where it
differs, so that one process does for a whole suite and many mutants. Mutants are made of a backward that the gate has
accepted: they are wrong and not hostile.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.gate.answer import Stage
from kernel_agent.gate.child import FILE, run_backward, run_forward
from kernel_agent.gate.child_answers import Ended, tell_failure
from kernel_agent.gate.mutants.same import same
from kernel_agent.ir import ExecOptions, Numerics, import_module, standin
from kernel_agent.ir.launch import LaunchOptions, Runner, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.mistakes import OPERATION_MUTATORS
from kernel_agent.ir.mutations import Mutated, Mutation, mutations
from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.values import RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

_LEAST_SECONDS = 5.0
_TIMES_HONEST = 20.0
"""A mutant may take so much longer than the honest backward in a case before it counts as endless."""
_MUTATORS = {mutator.name: mutator for mutator in OPERATION_MUTATORS}
_LOOSE = ("calls", "launches", "program", "replaced", "extra_saved_bytes")
"""Parts of an answer that a right backward may have otherwise."""


class TooSlow(Exception):
    """A mutant takes much longer than the honest backward."""


@dataclasses.dataclass
class _Heard:
    """Stands in for the channel: keeps what a run would have told the parent."""

    payload: dict[str, Any]
    tensors: dict[str, Tensor]
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    sent: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def send(self, record: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Keep a message."""
        self.record, self.sent = dict(record), dict(tensors or {})


def judged(call: Call) -> None:
    """Payload: `source`, `points` and `cases` as for `child.answered`; `scales`, per case one S per gradient;
    `faithful`, whether arithmetic rounds; `count`, how many mutants of each class to make on IR (0: all, -1: none;
    with `rounds`, of classes that round alone), of which each of `parts` processes has its own, numbered by `part`; and
    `mutants`, each with `source` or `mutation`, the case `start`, and `whole`, whether every answer is sent.

    Sends an answer of the honest backward per case, with the grids of its launches; then the `mutations` that were
    made; then for every mutant, those of the payload first, a message per answer that is sent, and one without a case.
    """
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True  # bytecode is known by size and second: mutants of one second would be taken for one
    with standin():
        _Crowd(call, call.scratch / FILE).run()


class _Crowd:
    """The honest backward's answers, and the mutants that are held against them."""

    def __init__(self, call: Call, path: Path) -> None:
        self.call = call
        self.path = path
        self.cases: list[dict[str, Any]] = call.payload["cases"]
        self.options = ExecOptions()
        if call.payload["faithful"]:
            self.options = ExecOptions(sanitize=False, numerics=Numerics.FAITHFUL)
        self.saved: dict[int, tuple[Any, ...]] = {}
        self.honest: list[_Heard] = []
        self.seconds: list[float] = []
        self.modules: dict[int, Module] = {}
        """Of the honest backward."""
        self.module: ModuleType

    def run(self) -> None:
        """All of it."""
        module = self.module = self._imported(self.call.payload["source"], "honest")
        for number, case in enumerate(self.cases):
            grids: list[Any] = []
            start = time.perf_counter()
            heard = self._heard()
            try:
                if case["point"] not in self.saved:
                    self.saved[case["point"]] = self._forward(heard, module, case["point"])
                self._backward(heard, module.backward, number, self._looking(grids))
            except Ended:
                self.call.send({"honest": number, "answer": heard.record, "grids": grids})
                return
            self.seconds.append(time.perf_counter() - start)
            self.honest.append(heard)
            self.call.send({"honest": number, "answer": heard.record, "grids": grids}, self._sent(heard))
        made = self._made()
        self.call.send({"mutations": [mutation.model_dump(mode="json") for mutation in made]})
        asked = [*self.call.payload["mutants"]]
        asked += [
            {"mutation": m.model_dump(mode="json"), "start": 0, "whole": self.call.payload["faithful"]} for m in made
        ]
        for index, form in enumerate(asked):
            self._mutant(index, form)

    def _sent(self, heard: _Heard) -> dict[str, Tensor]:
        """The honest gradients are for where rounding is judged; elsewhere the parent has the truth."""
        return heard.sent if self.call.payload["faithful"] else {}

    def _made(self) -> list[Mutation]:
        count, rounds = self.call.payload["count"], self.call.payload["rounds"]
        if count < 0:
            return []
        found: list[Mutation] = []
        for mutator in OPERATION_MUTATORS:
            if mutator.rounds is rounds:
                here = {
                    (m.kernel, m.place, m.way): m
                    for module in self.modules.values()
                    for m in mutations(module, [mutator])
                }
                found += spread(list(here.values()), count)
        return found[self.call.payload["part"] :: self.call.payload["parts"]]

    def _looking(self, grids: list[Any]) -> Runner:
        def runner(
            module: Module,
            grid: tuple[int, int, int],
            arguments: Sequence[RuntimeValue],
            buffers: dict[int, Buffer],
            findings: Findings,
            options: LaunchOptions,
        ) -> None:
            self.modules.setdefault(id(module), module)
            grids.append([module.entry.name, *grid])
            launch(module, grid, arguments, buffers, findings, options)

        return runner

    def _mutant(self, index: int, form: dict[str, Any]) -> None:
        start = time.perf_counter()
        loose: dict[str, Any] | None = None
        runner: Runner = launch
        heard = self._heard()
        module = self.module
        try:
            if form.get("source"):
                module = self._imported(form["source"], f"mutant_{index}")
        except (Exception, SystemExit) as error:
            channel: Any = heard
            tell_failure(channel, Stage.BACKWARD, 0, error, self.path)
            self._say(index, form["start"], heard, start)
            self._say(index, None, None, start)
            return
        if form.get("mutation"):
            mutation = Mutation.model_validate(form["mutation"])
            runner = Mutated(mutation, _MUTATORS[mutation.mutator]).runner
        for number in range(form["start"], len(self.cases)):
            heard = self._heard()
            try:
                with _alarm(max(_LEAST_SECONDS, _TIMES_HONEST * self.seconds[number])):
                    self._backward(heard, module.backward, number, runner)
            except Ended:
                self._say(index, number, heard, start)
                break
            if form["whole"]:
                self._say(index, number, heard, start)
            elif not self._alike(heard, number):
                self._say(index, number, heard, start)
                break
            elif loose is None and any(heard.record[part] != self.honest[number].record[part] for part in _LOOSE[:2]):
                loose = {"case": number, "heard": heard}
        else:
            if loose is not None:
                self._say(index, loose["case"], loose["heard"], start, alike=True)
        self._say(index, None, None, start)

    def _alike(self, heard: _Heard, number: int) -> bool:
        """Whether an answer is the honest one, up to rounding of float64 (in faithful arithmetic, to the bit)."""
        honest, needs = self.honest[number], self.cases[number]["needs"]

        def strict(record: dict[str, Any]) -> dict[str, Any]:
            kept = {key: value for key, value in record.items() if key not in (*_LOOSE, "returned", "number")}
            kept["returned"] = [
                value for k, value in enumerate(record["returned"]) if needs is None or k >= len(needs) or needs[k]
            ]
            return kept

        if strict(heard.record) != strict(honest.record):
            return False
        scales = self.call.payload["scales"][number]
        for key, wanted in honest.sent.items():
            place = int(key)
            if needs is not None and place < len(needs) and not needs[place]:
                continue
            given = heard.sent.get(key)
            if given is None or given.shape != wanted.shape:
                return False
            if self.call.payload["faithful"]:
                if not torch.equal(given.nan_to_num(), wanted.nan_to_num()):
                    return False
            elif not same(given, wanted, scales[place] if place < len(scales) else 0.0):
                return False
        return True

    def _say(self, index: int, number: int | None, heard: _Heard | None, start: float, *, alike: bool = False) -> None:
        record: dict[str, Any] = {"mutant": index, "case": number, "alike": alike}
        record |= {"answer": None if heard is None else heard.record, "seconds": time.perf_counter() - start}
        tensors = {} if heard is None else dict(heard.sent)
        if number is not None and not alike:  # what is wrong by rounding alone is told by the parent, who has S
            tensors |= {f"honest.{key}": tensor for key, tensor in self.honest[number].sent.items()}
        self.call.send(record, tensors)

    def _heard(self) -> _Heard:
        return _Heard(self.call.payload, self.call.tensors)

    def _forward(self, heard: _Heard, module: ModuleType, point: int) -> tuple[Any, ...]:
        channel: Any = heard
        return run_forward(channel, module.forward, self.path, point, options=self.options)

    def _backward(self, heard: _Heard, backward: Callable[..., Any], number: int, runner: Runner) -> None:
        channel: Any = heard
        saved = self.saved[self.cases[number]["point"]]
        run_backward(channel, backward, self.path, number, saved, options=self.options, runner=runner)

    def _imported(self, source: str, name: str) -> ModuleType:
        # One path for all: kernels that two files share are lowered once.
        self.path.write_text(source, encoding="utf-8")
        return import_module(self.path, f"kernel_agent_{name}")


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(_: int, __: FrameType | None) -> None:
        raise TooSlow(f"more than {seconds:.0f} s, {_TIMES_HONEST:.0f} times what the honest backward takes")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def spread(found: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, spread over the whole; all for 0."""
    if not count:
        return list(found)
    step = max(1, len(found) // count)
    return list(found[step // 2 :: step][:count])
