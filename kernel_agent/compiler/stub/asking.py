"""`Asking`: statements that raise where the plan of a launch would be wrong."""

from __future__ import annotations

from contextlib import nullcontext

from kernel_agent.compiler.free_names import words
from kernel_agent.compiler.plan import IN_ORDER, LEFT, LISTED, PICKED, Census, Counting, Fact, Inverse, Listing
from kernel_agent.compiler.stub.lines import HELPERS, Line, asked_unless, helpers_of, quoted
from kernel_agent.compiler.stub.wording import Wording

_ROOM = 80
"""Characters of a message on one line."""


class Asking:
    """Writes what one plan asks for."""

    def __init__(self, wording: Wording) -> None:
        self.wording = wording
        self.body = wording.body

    def settings(self) -> dict[str, str]:
        """Settings that facts ask for."""
        plan = self.wording.plan
        asked = {word for fact in plan.facts for word in words(fact.expression)}
        return {name: text for name, text in plan.settings.items() if name in asked}

    def facts(self) -> None:
        """Of the launch's numbers and tensors, each once."""
        asked = {"True"}
        for fact in self.wording.plan.facts:
            with self.wording.under([{}]) if fact.of_forward else nullcontext():
                shown = self.wording.condition(fact.expression)
            if shown in asked:
                continue
            asked.add(shown)
            self.body.helpers |= helpers_of(fact.expression)
            self.body.write(
                asked_unless(shown), Line(f"raise ValueError({quoted(self._objection(fact, shown))})", depth=1)
            )

    def _objection(self, fact: Fact, shown: str) -> str:
        """What the backward says where a fact does not hold: the fact itself if a line has room for it."""
        reason = f"{fact.reason} only if {shown}"
        if len(reason) <= _ROOM:
            return reason
        given = self.wording.launched.seen.tensors
        if fact.tensor in given:  # a cotangent's strides are the backward's own, and nothing that a user passes
            tensor = self.wording.references.outlasting(given[fact.tensor])
            return f"strides of {tensor} do not show that {fact.reason}: pass {tensor}.contiguous()"
        return f"{fact.reason}, but not for these sizes"

    def census(self, census: Census) -> None:
        """Of the counts of rows, which are there by now: it zeroes those that are not counted, too."""
        variables = self.wording.variables
        self.body.helpers[HELPERS[LEFT]] = None
        left = f"{LEFT}({variables[census.counts.name]})"
        if census.whole:
            width = self.wording.short(census.width)
            left = f"{variables[census.gradient]}.view(-1, {width})[{left}] = 0"
        self.body.write(Line(left))

    def counting(self, listing: Listing, counting: Counting) -> None:
        """Of the additions that programs counted: the most that one makes."""
        variables = self.wording.variables
        most = f"max(1, int({variables[counting.counts.name]}.max()))"
        variables[counting.most] = self.body.bind(f"{self.wording.gradient(listing.gradient)}_most", most)

    def listing(self, listing: Listing) -> None:
        """Of the rows that were listed: which additions each has."""
        variables = self.wording.variables
        helper = IN_ORDER if listing.counting is None else PICKED
        self.body.helpers |= {HELPERS[name]: None for name in (IN_ORDER, helper)}
        base = self.wording.gradient(listing.gradient)
        for argument, end in ((listing.order, "order"), (listing.begins, "begins")):
            variables[argument] = self.body.fresh(f"{base}_{end}")
        rows, count = variables[listing.rows.name], self.wording.short(listing.count)
        self.body.write(Line(f"{variables[listing.order]}, {variables[listing.begins]} = {helper}({rows}, {count})"))

    def inverse(self, inverse: Inverse) -> None:
        """Of a list that memory has: which of its places each row has."""
        variables = self.wording.variables
        self.body.helpers[HELPERS[LISTED]] = None
        base = self.wording.gradient(inverse.gradient)
        names = [self.body.fresh(f"{base}_{end}") for end in ("order", "begins", "programs")]
        variables |= dict(zip((inverse.order, inverse.begins, inverse.known), names, strict=True))
        given = (inverse.rows, inverse.bounds, inverse.programs, inverse.count)
        self.body.write(Line(f"{', '.join(names)} = {LISTED}(", tuple(map(self.wording.short, given)), ")"))
