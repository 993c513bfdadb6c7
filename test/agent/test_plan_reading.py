"""What of a reply becomes a plan, and what is told when something is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import PAIR, spec_of

from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.plan import Plan, Reduction
from kernel_agent.agent.planchecks import summed_dims
from kernel_agent.agent.reflection import PlanReading, plan_skeleton, read_plan
from kernel_agent.agent.state import fold
from kernel_agent.models.protocol import StopReason
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file

NORM = PAIR.model_copy(update={"slug": "layernorm_row", "family": "norm_row"})
PAIRS = (PAIR, NORM)
"""`scaled_copy` and `layernorm_row`."""

FACTS = ForwardFacts(
    launches=(),
    crossing=(
        "x: no sum across programs: each element is read by one program only",
        "w: dw sums over M (axis 0) across programs: all 31 read the same element; 3 elements are not read",
    ),
)


@pytest.fixture
def spec() -> KernelSpec:
    """`product(x, w)`: gradients of x and w; saved are x, w and y."""
    from scripted import FORWARD

    return spec_of(read_file(FORWARD))


def planned(**changes: Any) -> dict[str, Any]:
    """A plan as it should be; `x__owner="..."` changes a field of the gradient of x."""
    gradient = {"techniques": [], "saved": [], "recomputed": []}
    plan: dict[str, Any] = {
        "pairs": [
            {"slug": "scaled_copy", "match": "elementwise", "mismatch": "one operand is a scalar"},
            {"slug": "layernorm_row", "match": "dweight sums over rows", "mismatch": "no statistics here"},
        ],
        "anchor": "scaled_copy",
        "differences": [{"difference": "two tensors", "implies": "two gradients"}],
        "gradients": [
            {"grad": "x", "owner": "a tile of x", "reduction": "plain store", **gradient, "saved": ["w"]},
            {"grad": "w", "owner": "a tile of w", "reduction": "atomics", **gradient, "saved": ["x"]},
        ],
    }
    for name, value in changes.items():
        grad, _, field = name.partition("__")
        if field:
            next(one for one in plan["gradients"] if one["grad"] == grad)[field] = value
        else:
            plan[name] = value
    return plan


def reply(plan: dict[str, Any]) -> str:
    return f"The forward is a product.\n\n```json\n{json.dumps(plan, indent=2)}\n```\n\nThat is the plan.\n"


@pytest.fixture
def read(spec: KernelSpec) -> Callable[..., PlanReading]:
    """Reads a plan with changes, or a whole text."""

    def reader(text: str | None = None, *, options: dict[str, Any] | None = None, **changes: Any) -> PlanReading:
        return read_plan(reply(planned(**changes)) if text is None else text, spec, PAIRS, **(options or {}))

    return reader


def plan_of(reading: PlanReading) -> Plan:
    assert reading.plan is not None, reading.problem
    assert reading.problem == ""
    return reading.plan


def problem_of(reading: PlanReading) -> str:
    assert reading.plan is None
    return reading.problem


# What is found.


def test_a_block_with_prose_around_it_is_the_plan(read: Callable[..., PlanReading]) -> None:
    plan = plan_of(read())
    assert plan.anchor == "scaled_copy"
    assert [one.grad for one in plan.gradients] == ["x", "w"]
    assert plan.gradients[1].reduction is Reduction.ATOMICS
    assert plan.gradients[0].saved == ("w",)


def test_of_several_blocks_the_last_plan_counts(read: Callable[..., PlanReading]) -> None:
    first, second = planned(anchor=None), planned(anchor="layernorm_row")
    text = reply(first) + "No: rows matter.\n" + reply(second) + 'A case would be\n```json\n{"M": 3}\n```\n'
    assert plan_of(read(text)).anchor == "layernorm_row"


def test_a_block_that_was_cut_off_does_not_replace_a_complete_one(read: Callable[..., PlanReading]) -> None:
    text = reply(planned()) + "Better:\n```json\n" + json.dumps(planned(anchor=None), indent=2)[:200]
    assert plan_of(read(text)).anchor == "scaled_copy"


def test_an_object_without_fences_is_read(read: Callable[..., PlanReading]) -> None:
    assert plan_of(read("\n" + json.dumps(planned()) + "\n")).anchor == "scaled_copy"


def test_entries_come_in_the_order_of_what_was_shown(read: Callable[..., PlanReading]) -> None:
    swapped = planned()
    swapped["pairs"].reverse()
    swapped["gradients"].reverse()
    plan = plan_of(read(reply(swapped)))
    assert [one.slug for one in plan.pairs] == ["scaled_copy", "layernorm_row"]
    assert [one.grad for one in plan.gradients] == ["x", "w"]


def test_other_spellings_are_put_right(read: Callable[..., PlanReading]) -> None:
    # Each would cost an ask, and no reader would be in doubt.
    spelt = planned(anchor="norm_row/layernorm_row.py", w__reduction="Atomics", x__reduction="plain_store")
    spelt["gradients"][0] |= {"grad": "dx", "techniques": ["Strided_Cotangent", "recompute (of the mask)"]}
    spelt["gradients"][1]["grad"] = "grad_w"
    plan = plan_of(read(reply(spelt)))
    assert plan.anchor == "layernorm_row"
    assert [one.grad for one in plan.gradients] == ["x", "w"]
    assert plan.gradients[0].techniques == ("strided-cotangent", "recompute")


def test_a_cotangent_among_the_saved_is_left_out_with_a_note(read: Callable[..., PlanReading]) -> None:
    reading = read(x__saved=["grad_y", "w"])
    assert plan_of(reading).gradients[0].saved == ("w",)
    assert reading.notes == ("dx: `grad_y` is no entry of `saved`; backward receives it anyway.",)


def test_without_pairs_there_is_none_to_read(spec: KernelSpec) -> None:
    reading = read_plan(reply(planned(pairs=[], anchor=None)), spec, ())
    assert plan_of(reading).pairs == ()


# What is no plan.


@pytest.mark.parametrize(
    ("text", "stop", "words"),
    [
        ("I would use atomics.", StopReason.COMPLETE, "holds no plan"),
        ("```python\ndef backward(saved): ...\n```", StopReason.COMPLETE, "holds no plan"),
        ("```json\n[1, 2]\n```", StopReason.COMPLETE, "holds no plan"),
        ('```json\n{"pairs": [', StopReason.LENGTH, "cut off"),
        ('```json\n{"pairs": [', StopReason.COMPLETE, "cut off"),
        ("I cannot help with that.", StopReason.REFUSAL, "declined"),
        ('```json\n{"gradients": NaN}\n```', StopReason.COMPLETE, "holds NaN"),
        ('```json\n{"anchor": null, "anchor": 1}\n```', StopReason.COMPLETE, "`anchor` twice"),
        ("```json\n" + '{"a": ' * 100_000 + "\n```", StopReason.COMPLETE, "nested too deeply"),
    ],
)
def test_a_reply_without_a_readable_object_is_told_why(
    read: Callable[..., PlanReading], text: str, stop: StopReason, words: str
) -> None:
    assert words in problem_of(read(text, options={"stop": stop}))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"anchor": "scaled_copy",', '"anchor": "scaled_copy",,', "line 14"),
        ('"implies": "two gradients"', '"implies": "two gradients",', "a trailing comma"),
        ('"differences"', '// what differs\n  "differences"', "`// what differs`: a comment"),
        ('"anchor"', "'anchor'", "single quotes"),
        ('"two tensors"', '"two\ntensors"', '`"difference": "two`: a line break inside a string'),
    ],
)
def test_what_json_is_not_is_refused_with_its_line(
    read: Callable[..., PlanReading], before: str, after: str, words: str
) -> None:
    text = reply(planned())
    assert text.count(before) == 1
    assert words in problem_of(read(text.replace(before, after)))


def test_a_trailing_comma_is_placed_on_its_own_line(read: Callable[..., PlanReading]) -> None:
    # The parser complains of the bracket on the line below.
    block = json.dumps(planned(), indent=2).replace('"implies": "two gradients"', '"implies": "two gradients",')
    line = next(n for n, text in enumerate(block.split("\n"), start=1) if '"implies"' in text)
    problem = problem_of(read(f"```json\n{block}\n```"))
    assert f'line {line} of the block, `"implies": "two gradients",`: a trailing comma' in problem


# What is wrong with a plan.


def test_all_that_is_wrong_is_told_at_once(read: Callable[..., PlanReading]) -> None:
    # One complaint per ask would burn the budget on form.
    problem = problem_of(read(anchor="nowhere", x__owner=" ", w__techniques=["atomic"], w__saved=["z"]))
    assert problem.startswith("4 things are wrong with the plan:\n- ")
    assert problem.count("\n- ") == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x__owner": "..."}, "`gradients[0].owner` says nothing"),
        ({"x__recomputed": [""]}, "`gradients[0].recomputed[0]` says nothing"),
        ({"differences": [{"difference": "d", "implies": " "}]}, "`differences[0].implies` says nothing"),
        ({"x__owner": "o" * 1001}, "has 1001 characters"),
        ({"x__techniques": ["two-stage-partial"]}, "did you mean `two-stage-partials`?"),
        ({"x__reduction": "partial"}, "did you mean `partials`?"),
        ({"x__reduction": None}, "`gradients[0].reduction`"),
        ({"x__saved": ["xx"]}, "dx: `saved` has no `xx`"),
        ({"x__saved": ["w"], "x__recomputed": ["w"]}, "both read from `saved` and computed again"),
        ({"x__note": "n"}, "`gradients[0].note` is no field of a plan"),
        ({"anchor": "scaled_cpy"}, "did you mean `scaled_copy`?"),
        ({"x__techniques": ["atomics"]}, "Say one of them"),
        ({"x__grad": "y"}, "`gradients` names `y`, which is no gradient"),
        ({"x__grad": "w"}, "`gradients` names `w` 2 times"),
        ({"gradients": []}, "leaves out the gradient `x`"),
        ({"gradients": "all of them"}, "`gradients[0]`"),
        ({"pairs": []}, "leaves out the retrieved pair `layernorm_row`"),
        ({"pairs": None}, "`pairs[0]`"),
        ({"anchor": 3}, "`anchor`"),
    ],
)
def test_a_mistake_is_told_with_its_place(
    read: Callable[..., PlanReading], changes: dict[str, Any], words: str
) -> None:
    assert words in problem_of(read(**changes))


def test_the_skeleton_has_every_name_and_would_be_refused(spec: KernelSpec) -> None:
    # A model that hands it back has planned nothing.
    skeleton = plan_skeleton(spec, PAIRS)
    form = json.loads(skeleton)
    assert [item["slug"] for item in form["pairs"]] == ["scaled_copy", "layernorm_row"]
    assert [item["grad"] for item in form["gradients"]] == ["x", "w"]
    assert "says nothing" in problem_of(read_plan(f"```json\n{_filled(skeleton)}\n```", spec, PAIRS))


def _filled(skeleton: str) -> str:
    form = json.loads(skeleton)
    for gradient in form["gradients"]:
        gradient |= {"reduction": "plain store", "techniques": [], "whole": []}
    return json.dumps(form)


# What is allocated beyond the layout.

XHAT = {"name": "xhat", "dtype": "float32", "shape": ["N", 4]}


def test_an_extra_tensor_may_be_read(read: Callable[..., PlanReading]) -> None:
    plan = plan_of(read(extra=[XHAT], x__saved=["xhat"]))
    assert plan.extra[0].shape == ("N", 4)
    assert plan.gradients[0].saved == ("xhat",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "x"}, "`x` is saved already"),
        ({"name": "x hat"}, "is no name"),
        ({"dtype": "fp32"}, "`fp32` is no dtype here"),
        ({"shape": ["K"]}, "`K` in `K` is no dim of SWEEP (N)"),
        ({"shape": ["N-1000"]}, "is no size"),
        ({"shape": ["N**9"]}, "holds more than dims"),
        ({"shape": ["__import__('os').getpid()"]}, "holds more than dims"),
    ],
)
def test_an_extra_tensor_must_have_a_name_a_dtype_and_sizes(
    read: Callable[..., PlanReading], change: dict[str, Any], words: str
) -> None:
    assert words in problem_of(read(extra=[{**XHAT, **change}]))


def test_scratch_has_sizes_as_well(read: Callable[..., PlanReading]) -> None:
    assert plan_of(read(scratch=[XHAT])).scratch[0].name == "xhat"
    assert "`scratch[0].shape`: `K` in `K` is no dim" in problem_of(read(scratch=[{**XHAT, "shape": ["K"]}]))


def test_a_frozen_forward_saves_nothing_more(read: Callable[..., PlanReading]) -> None:
    assert "--freeze-forward" in problem_of(read(extra=[XHAT], options={"freeze_forward": True}))


# What the facts of the forward say against it.


@pytest.mark.parametrize("reduction", ["plain store", "loop swap"])
def test_a_store_that_would_lose_terms_is_refused_with_the_fact(
    read: Callable[..., PlanReading], reduction: str
) -> None:
    # The most common wrong plan: dw stored by the program of a row, so that the last row wins.
    problem = problem_of(read(w__reduction=reduction, w__whole=["N"], options={"facts": FACTS}))
    assert "dw sums over M (axis 0) across programs: all 31 read the same element" in problem
    assert "`whole` does not name `M`" in problem
    assert "3 elements are not read" not in problem


@pytest.mark.parametrize("owner", ["one row", "a column tile of w, walking all rows of x"])
def test_a_plain_store_is_judged_by_dims_and_not_by_words(read: Callable[..., PlanReading], owner: str) -> None:
    # A sound plan was refused for how its owner was worded, which cost an ask.
    reading = read(w__reduction="plain store", w__owner=owner, w__whole=["M"], options={"facts": FACTS})
    assert plan_of(reading).gradients[1].reduction is Reduction.PLAIN_STORE
    assert "must collect them all" in reading.notes[0]


def test_a_plan_that_does_not_say_what_it_takes_whole_is_left_to_the_gate(read: Callable[..., PlanReading]) -> None:
    reading = read(w__reduction="plain store", w__owner="one row of x", options={"facts": FACTS})
    assert plan_of(reading).gradients[1].whole is None
    assert "must collect them all" in reading.notes[0]


@pytest.mark.parametrize(
    ("sentence", "dims"),
    [
        ("du sums over B, V (axis 0 and 1) across programs: 4 of 12 read the same element", ("B", "V")),
        ("dw sums over M (axis 0) across programs: all 31 read the same element", ("M",)),
        ("dk sums over B*H (axis 1) across programs: 2 of 12 read the same element", ("B*H",)),
        ("dw sums over axis 0 across programs: 2 of 12 read the same element", ()),
        ("dw sums across programs: 2 of 12 read the same element", ()),
    ],
)
def test_dims_are_read_off_the_sentence_of_the_facts(sentence: str, dims: tuple[str, ...]) -> None:
    assert summed_dims(sentence) == dims


@pytest.mark.parametrize(("whole", "sound"), [(["B", "H"], True), (["B*H"], True), (["H"], False)])
def test_a_product_of_dims_is_taken_whole_with_its_factors(
    read: Callable[..., PlanReading], whole: list[str], sound: bool
) -> None:
    crossing = "w: dw sums over B*H (axis 1) across programs: 2 of 12 read the same element"
    facts = ForwardFacts(launches=(), crossing=(crossing,))
    assert (read(w__reduction="plain store", w__whole=whole, options={"facts": facts}).plan is not None) is sound


RECORDED = Path(__file__).resolve().parents[2] / "bench" / "agent_runs" / "reflection" / "gated_recurrence"


def test_a_sound_plan_that_was_once_refused_is_a_plan() -> None:
    # Its owner of dr, "a chunk of time of one head, all of K and V", holds every term; no word of a list says so.
    state = fold(read_ledger(RECORDED / "trace.jsonl").entries)
    assert state.spec is not None
    assert state.retrieval is not None
    pairs = [pair for pair in state.retrieval.pairs if pair.chosen]
    text = (RECORDED / "replies" / "0001.md").read_text(encoding="utf-8")
    plan = plan_of(read_plan(text, state.spec, pairs, facts=state.facts))
    assert plan.gradients[0].reduction is Reduction.PLAIN_STORE
    owner = '"owner": "a chunk of time of one head, all of K and V",'
    for whole, sound in ((["K", "V"], True), (["K"], False)):
        stated = text.replace(owner, f'{owner} "whole": {json.dumps(whole)},')
        assert (read_plan(stated, state.spec, pairs, facts=state.facts).plan is not None) is sound, whole


@pytest.mark.parametrize("facts", [None, FACTS])
def test_a_gradient_without_a_sum_across_programs_may_be_stored(
    read: Callable[..., PlanReading], facts: ForwardFacts | None
) -> None:
    assert read(x__owner="one row of x", options={"facts": facts}).notes == ()
