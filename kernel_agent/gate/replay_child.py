"""What runs in the process that carries a candidate's record out again. No code of the candidate runs here.

It holds the user's own forward, the candidate's kernels, and the steps that the candidate's process wrote down. What it
answers is the gate's own observation: gradients, launches, torch functions, findings of the sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from kernel_agent.gate.answer import Answer, Stage
from kernel_agent.gate.carried import carried
from kernel_agent.gate.child import FILE, MODULE, run_backward, run_forward
from kernel_agent.gate.child_answers import Ended, say, tell_failure
from kernel_agent.gate.kernel_names import refuse_foreign_names
from kernel_agent.ir import import_module, standin
from kernel_agent.ir.lower import know, lowered
from kernel_agent.ir.recorded.program import Program
from kernel_agent.ir.recorded.replay import Kernels, Replayed, find_kernels

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

MOST_NUMBERS = 4096
"""Numbers that may stand in one program: a gradient does not fit, nor do the derivatives it would be made of."""
MOST_OF_ONE_CASE = 32
"""Numbers in the program of one case that stand in no other case of its point, and places in which it differs from
one that has other values and nothing else: what may have come from a cotangent."""


def replayed(call: Call) -> None:
    """Payload: as for `child.answered`, with `source` reduced to kernels, `trusted_lines`, `forwards` and `backwards`,
    the programs of all points and cases as JSON text, the forward's `parameters`, and per case its kind of
    `cotangents`, and whether it is one `again`."""
    torch.set_num_threads(1)
    know(call.payload["lowered"])
    path = call.scratch / FILE
    path.write_text(call.payload["source"], encoding="utf-8")
    try:
        with standin():
            module, kernels = _imported(call, path)
            backwards = without_smuggled([_read(text) for text in call.payload["backwards"]], _asked(call.payload))
            forwards = [] if call.payload["trusted_lines"] else [_read(text) for text in call.payload["forwards"]]
            saved: dict[int, tuple[Any, ...]] = {}
            told = set(call.payload["lowered"])
            for number, case in enumerate(call.payload["cases"]):
                point = case["point"]
                if point not in saved:
                    forward: Callable[..., Any] = (
                        Replayed(forwards[point], kernels, call.payload["parameters"])
                        if forwards
                        else getattr(module, "forward")  # noqa: B009
                    )
                    saved[point] = run_forward(call, forward, path, point, users=not forwards)
                run_backward(call, Replayed(backwards[number], kernels), path, number, saved[point], known=told)
                told |= lowered(told).keys()
    except Ended:
        return


def _imported(call: Call, path: Path) -> tuple[ModuleType, Kernels]:
    try:
        module = import_module(path, MODULE)
        refuse_foreign_names(call.payload["source"], module, call.payload["trusted_lines"])
        kernels = find_kernels(module)
    except Exception as error:
        raise tell_failure(call, Stage.IMPORT, 0, error, path) from error
    say(call, Answer(stage=Stage.IMPORT))
    return module, kernels


def _read(text: str) -> Program:
    try:
        return Program.model_validate_json(text)
    except (ValidationError, RecursionError):
        return Program(refused="the candidate's process sent a record that is none")


@dataclass(frozen=True)
class Asked:
    """What tells which cases must share their numbers."""

    point: int
    cotangents: str
    """Kind: those of one kind are the same at one point."""
    again: bool
    turn: int = 0
    """Which configurations of autotuned kernels it takes."""

    def differs_by_values(self, other: Asked) -> bool:
        """Whether another case has other values and nothing else: see `batch.turns`.

        The first call is none of these, since kernels may be launched there to choose a configuration.
        """
        here = (self.point, self.turn) == (other.point, other.turn)
        return here and self.cotangents != other.cotangents and (self.again or other.again)


def _asked(payload: dict[str, Any]) -> list[Asked]:
    cases = payload["cases"]
    points, turns = [case["point"] for case in cases], [case["turn"] for case in cases]
    return [Asked(*parts) for parts in zip(points, payload["cotangents"], payload["again"], turns, strict=True)]


def without_smuggled(programs: list[Program], asked: list[Asked]) -> list[Program]:
    """Programs that carry so many numbers, or so many that differ between cotangents, may carry the result itself.

    One that is asked again has none that did not stand in the same case before: it would be what was kept of that.
    """
    numbers = [program.constants() for program in programs]
    checked = []
    for program, mine, this in zip(programs, numbers, asked, strict=True):
        here = [(other, some) for other, some in zip(asked, numbers, strict=True) if other.point == this.point]
        others = [some for other, some in here if other.cotangents != this.cotangents]
        before = [some for other, some in here if other.cotangents == this.cotangents and not other.again]
        fresh = mine.difference(*others) if others else frozenset()
        like = [
            other
            for other, one in zip(programs, asked, strict=True)
            if this.differs_by_values(one) and not other.refused
        ]
        reason = ""
        if len(mine) > MOST_NUMBERS:
            reason = f"{len(mine)} numbers stand in its steps"
        elif len(fresh) > MOST_OF_ONE_CASE:
            reason = f"{len(fresh)} numbers in its steps depend on the cotangent"
        elif (places := carried(program, like)) > MOST_OF_ONE_CASE:
            reason = f"{places} places of its steps depend on the cotangent"
        elif this.again and (kept := program.constants(sizes=False).difference(*before, *others)):
            reason = f"{len(kept)} numbers in its steps stand in none of the calls before"
        refused = Program(refused=f"{reason}, and no kernel or torch function made them")
        checked.append(refused if reason and not program.refused else program)
    return checked
