"""`PlanChecks`: whether a plan that is well-formed also fits the forward, the retrieved pairs and itself."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kernel_agent.agent.events import RetrievedPair
from kernel_agent.agent.plan import ExtraSaved, GradientPlan, PairReading, Plan, Reduction
from kernel_agent.agent.sizes import BadSize, size_of
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.generated import saved_layout
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.techniques import TECHNIQUES

LONGEST = 1000
"""Characters of one statement: the plan is shown again with every ask."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element of the dtypes that a forward may save more of."""

CROSSING_TECHNIQUES = frozenset({"atomics", "two-stage-partials", "split-k", "stream-k", "spin-lock"})
"""Techniques in which several programs write to one element: none goes with a plain store."""

_OVER = re.compile(r" sums over (?P<dims>[A-Za-z_][\w*, ]*?) \(axis ")
"""In a sentence of the facts: the dims over which programs of the forward share an element."""


class PlanChecks:
    """One plan held against one spec. `problems` refuse it, `notes` do not."""

    def __init__(
        self,
        spec: KernelSpec,
        pairs: tuple[RetrievedPair, ...],
        facts: ForwardFacts | None,
        freeze_forward: bool,
    ) -> None:
        self.spec = spec
        self.slugs = tuple(pair.slug for pair in pairs)
        self.facts = facts
        self.freeze_forward = freeze_forward
        self.problems: list[str] = []
        self.notes: list[str] = []

    def run(self, plan: Plan) -> Plan:
        """Check everything; the plan comes back in the order of pairs and gradients, without what goes without saying.

        What comes back is of use only when `problems` is empty.
        """
        self._statements(plan)
        self._pairs(plan)
        self._allocated(plan)
        self._names("gradient", "gradients", [one.grad for one in plan.gradients], self.spec.grads)
        gradients = [self._gradient(one, plan) for one in plan.gradients if one.grad in self.spec.grads]
        return plan.model_copy(
            update={
                "pairs": tuple(sorted((p for p in plan.pairs if p.slug in self.slugs), key=self._place_of_pair)),
                "gradients": tuple(sorted(gradients, key=lambda one: self.spec.grads.index(one.grad))),
            }
        )

    def _place_of_pair(self, reading: PairReading) -> int:
        return self.slugs.index(reading.slug)

    def _statements(self, plan: Plan) -> None:
        for place, said in _statements(plan):
            if not said.strip(" .…?-"):
                self.problems.append(f"`{place}` says nothing.")
            elif len(said) > LONGEST:
                self.problems.append(f"`{place}` has {len(said)} characters; {LONGEST} are allowed.")

    def _pairs(self, plan: Plan) -> None:
        self._names("retrieved pair", "pairs", [one.slug for one in plan.pairs], self.slugs)
        if plan.anchor is not None and plan.anchor not in self.slugs:
            wanted = f"one of {_listed(self.slugs)}, or null" if self.slugs else "null: no pair was shown"
            self.problems.append(f"`anchor` is `{plan.anchor:.60}`{nearest(plan.anchor, self.slugs)}; it is {wanted}.")

    def _names(self, what: str, field: str, said: Sequence[str], wanted: Sequence[str]) -> None:
        """Each wanted name once and no other."""
        for name, count in Counter(said).items():
            if name not in wanted:
                self.problems.append(
                    f"`{field}` names `{name:.60}`, which is no {what}{nearest(name, wanted)}; "
                    + (f"there {_is(wanted)} {_listed(wanted)}." if wanted else "there is none.")
                )
            elif count > 1:
                self.problems.append(f"`{field}` names `{name}` {count} times; once is wanted.")
        for name in wanted:
            if name not in said:
                self.problems.append(f"`{field}` leaves out the {what} `{name}`.")

    def _allocated(self, plan: Plan) -> None:
        """What the plan saves more, and what it passes from launch to launch."""
        if plan.extra and self.freeze_forward:
            self.problems.append("`extra` saves more than the given forward does, which is frozen (--freeze-forward).")
        for field, tensors in (("extra", plan.extra), ("scratch", plan.scratch)):
            for place, one in enumerate(tensors):
                self._tensor(f"{field}[{place}]", one)

    def _tensor(self, where: str, one: ExtraSaved) -> None:
        if not one.name.isidentifier() or one.name in self._saved:
            why = "is saved already" if one.name in self._saved else "is no name"
            self.problems.append(f"`{where}`: `{one.name:.60}` {why}.")
        if one.dtype not in DTYPE_BYTES:
            near = nearest(one.dtype, DTYPE_BYTES)
            self.problems.append(f"`{where}.dtype`: `{one.dtype:.40}` is no dtype here{near}.")
        for size in one.shape:
            self.problems += self._bad_size(f"{where}.shape", size)

    def _bad_size(self, place: str, size: int | str) -> list[str]:
        try:
            for entry in self.spec.sweep:
                size_of(size, entry.dims)
        except BadSize as error:
            return [f"`{place}`: {error}."]
        return []

    def _gradient(self, one: GradientPlan, plan: Plan) -> GradientPlan:
        where = f"d{one.grad}"
        for technique in one.techniques:
            if technique not in TECHNIQUES:
                near = nearest(technique, TECHNIQUES)
                self.problems.append(f"{where}: `{technique:.60}` is no technique of the closed list{near}.")
        extras = [extra.name for extra in plan.extra]
        known = (*self._saved, *extras)
        saved: list[str] = []
        for name in dict.fromkeys(one.saved):
            if name in known:
                saved.append(name)
            elif name in self._cotangents:
                self.notes.append(f"{where}: `{name}` is no entry of `saved`; backward receives it anyway.")
            else:
                self.problems.append(
                    f"{where}: `saved` has no `{name:.60}`{nearest(name, known)}; it holds {_listed(known)}. "
                    "What is saved beyond that stands in `extra`, with dtype and shape."
                )
        for name in sorted({*one.saved} & {*one.recomputed}):
            self.problems.append(f"{where}: `{name:.60}` is both read from `saved` and computed again.")
        self._reduction(one, where)
        whole = None if one.whole is None else tuple(dict.fromkeys(dim.strip() for dim in one.whole))
        return one.model_copy(
            update={"saved": tuple(saved), "techniques": tuple(dict.fromkeys(one.techniques)), "whole": whole},
        )

    def _reduction(self, one: GradientPlan, where: str) -> None:
        crossing = [name for name in one.techniques if name in CROSSING_TECHNIQUES]
        plain = one.reduction is Reduction.PLAIN_STORE
        if plain and crossing:
            self.problems.append(
                f"{where}: the reduction is a plain store, and the techniques name {_listed(crossing)}, in which "
                "several programs write to one element. Say one of them."
            )
            return
        told = sums_across(self.facts, one.grad)
        if not told or not (plain or one.reduction is Reduction.LOOP_SWAP):
            return
        missing = [] if one.whole is None else [dim for dim in summed_dims(told) if not _takes(one.whole, dim)]
        if missing:
            self.problems.append(
                f"{where}: a {one.reduction.value} by a program that takes {_listed(one.whole or ())} whole would lose "
                f"terms: in the forward, {told}, and `whole` does not name {_listed(missing)}. Say an owner that takes "
                f"all of {_listed(missing)}, in one tile or in a loop, or partials or atomics."
            )
        elif plain:
            self.notes.append(
                f"{where}: a plain store, though {told}: the owner `{one.owner:.80}` must collect them all."
            )

    @property
    def _saved(self) -> tuple[str, ...]:
        """Names of what is in `saved` with the given forward."""
        if not self.spec.facts.is_pair:
            return saved_layout(self.spec)
        stated = read_meta(self.spec.facts.source).saves
        tensors = (*(item.name for item in self.spec.inputs), *(item.name for item in self.spec.outputs))
        return tuple(dict.fromkeys((*(text.partition(":")[0].strip() for text in stated), *tensors)))

    @property
    def _cotangents(self) -> tuple[str, ...]:
        names = [facts.name for facts in self.spec.outputs]
        return (*(f"grad_{name}" for name in names), *(f"d{name}" for name in names))


def sums_across(facts: ForwardFacts | None, grad: str) -> str:
    """What the facts say of a gradient that sums over programs; empty when it does not, or nothing is known."""
    found = [said for said in _said_of(facts, grad) if f"d{grad} sums " in said and "tiles overlap" not in said]
    return found[0].partition(";")[0] if found else ""


def summed_dims(told: str) -> tuple[str, ...]:
    """The dims of `sums_across`: `("B", "V")`; none where programs are told apart by axes of the grid alone."""
    found = _OVER.search(told)
    return () if found is None else tuple(dim.strip() for dim in found["dims"].split(","))


def _takes(whole: Sequence[str], dim: str) -> bool:
    """Whether a program that takes these dims whole takes this one, which may be a product such as `B*H`."""
    said = {part.strip() for one in whole for part in (one, *one.split("*"))}
    return dim in said or set(dim.split("*")) <= said


def stays_in_one_program(facts: ForwardFacts | None, grad: str) -> bool:
    """Whether the facts say of every launch that an element is read by one program only, whatever the data."""
    found = _said_of(facts, grad)
    return bool(found) and all(said.startswith("no sum across programs: each") for said in found)


def _said_of(facts: ForwardFacts | None, grad: str) -> list[str]:
    """What the facts say of one gradient, launch by launch."""
    sentences = (sentence.partition(": ") for sentence in (() if facts is None else facts.crossing))
    return [said for subject, _, said in sentences if subject.partition(" in ")[0] == grad]


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or nothing when no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _statements(plan: Plan) -> Iterator[tuple[str, str]]:
    for place, reading in enumerate(plan.pairs):
        yield f"pairs[{place}].match", reading.match
        yield f"pairs[{place}].mismatch", reading.mismatch
    for place, difference in enumerate(plan.differences):
        yield f"differences[{place}].difference", difference.difference
        yield f"differences[{place}].implies", difference.implies
    for place, one in enumerate(plan.gradients):
        yield f"gradients[{place}].owner", one.owner
        for number, value in enumerate(one.recomputed):
            yield f"gradients[{place}].recomputed[{number}]", value


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
