"""Checks of a backward: on lines that a person would write, and asked once."""

from __future__ import annotations

from kernel_agent.compiler.stub.checks import shared_checks
from kernel_agent.compiler.stub.lines import WIDTH, Line, asked_unless


def check(condition: str) -> tuple[Line, Line]:
    return asked_unless(condition), Line('raise ValueError("no")', depth=1)


def test_a_long_condition_stands_in_a_row_for_each_alternative():
    # On one line it would be longer than any formatter leaves it, and a wrong joint would ask something else.
    first, second = (
        "(a.stride(1) >= 1 and a.stride(0) >= K * a.stride(1) + 1)",
        "(a.stride(0) >= 1 and a.stride(1) >= M)",
    )
    third = "K == 1"
    rows = asked_unless(f"{first} or {second} or {third}").shown(str, 0)
    assert rows == ["if not (", f"    {first}", f"    or {second}", f"    or {third}", "):"]
    assert max(map(len, rows)) <= WIDTH


def test_a_check_that_all_ways_have_is_asked_before_they_part():
    both, own = check("x.stride(0) >= N"), check("y.stride(0) >= N")
    shared, bodies = shared_checks([[*both, *own, Line("dx = f(x)")], [*both, Line("dx = g(x)")]])
    assert shared == [*both]
    assert bodies == [[*own, Line("dx = f(x)")], [Line("dx = g(x)")]]


def test_a_check_of_what_a_way_binds_stays_in_it():
    # Before the ways part, BLOCK has no value yet.
    body = [Line("BLOCK = 16"), *check("BLOCK >= N")]
    assert shared_checks([body, body]) == ([], [body, body])


def test_a_check_whose_rows_have_several_items_is_shared_like_others():
    # Its head ends with a comment for formatters: taken for a statement, it has no block and cannot be parsed.
    axes = tuple(f"(x.stride({axis}), extent_of_axis_{axis})" for axis in range(6))
    nested = (Line("if not axes_nested(", axes, "):"), Line('raise ValueError("no")', depth=1))
    assert nested[0].shown(str, 0)[-1].endswith(":  # fmt: skip")
    assert shared_checks([[*nested, Line("dx = f(x)")], [*nested, Line("dx = g(x)")]])[0] == [*nested]


def test_an_equation_is_asked_as_its_opposite_and_shared_like_other_checks():
    # `if not (a == b):` is what no person writes; taken for no check, it was asked once in each way.
    equation = check("x.numel() == M * N")
    assert equation[0].shown(str, 1) == ["    if x.numel() != M * N:"]
    assert shared_checks([[*equation, Line("dx = f(x)")], [*equation, Line("dx = g(x)")]])[0] == [*equation]


def test_strings_in_a_row_have_double_quotes_and_messages_what_they_quote():
    launch = Line("made = f(", ("options['BLOCK']", "x"), ")")
    assert launch.shown(str, 0) == ['made = f(options["BLOCK"], x)']
    message = Line("""raise ValueError("no ['BLOCK'] here")""")
    assert message.shown(str, 0) == ["""raise ValueError("no ['BLOCK'] here")"""]
