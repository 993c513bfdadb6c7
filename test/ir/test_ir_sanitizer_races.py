"""Races and what prevents them: every broken kernel has a twin that differs by the one thing that mends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import Finding, FindingKind, LaunchError, execute


def found(stub: Callable[..., object], *args: Tensor) -> list[Finding]:
    """Findings of one call."""
    return list(execute(stub, args).findings)


def racing_buffers(stub: Callable[..., object], *args: Tensor) -> set[str]:
    """Arguments that race; nothing else may be found."""
    findings = found(stub, *args)
    assert {finding.kind for finding in findings} <= {FindingKind.RACE}, [str(finding) for finding in findings]
    return {finding.buffer for finding in findings}


@triton.jit
def _locked_sum(
    X, Y, Lock, N, BLOCK: tl.constexpr, ACQUIRE: tl.constexpr, RELEASE: tl.constexpr, PLAIN_RELEASE: tl.constexpr
):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N)
    while tl.atomic_cas(Lock, 0, 1, sem=ACQUIRE) == 1:
        pass
    tl.store(Y + c, tl.load(Y + c, mask=c < N) + x, mask=c < N)
    tl.debug_barrier()
    if PLAIN_RELEASE:
        tl.store(Lock, 0)
    else:
        tl.atomic_xchg(Lock, 0, sem=RELEASE)


def locked_sum(acquire: str, release: str, plain_release: bool = False) -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[1], device=x.device)
        lock = torch.zeros(1, dtype=torch.int32, device=x.device)
        _locked_sum[(x.shape[0],)](x, y, lock, x.shape[1], 16, acquire, release, plain_release)
        return y

    return stub


@pytest.mark.parametrize(("acquire", "release"), [("acq_rel", "acq_rel"), ("acquire", "release")])
def test_accesses_under_a_lock_do_not_race(acquire, release):
    assert racing_buffers(locked_sum(acquire, release), torch.randn(3, 10)) == set()


@pytest.mark.parametrize(("acquire", "release"), [("relaxed", "release"), ("acquire", "relaxed")])
def test_a_lock_whose_atomics_are_relaxed_orders_nothing(acquire, release):
    # The lock still excludes, so that values come out right here: only the memory order is missing.
    assert racing_buffers(locked_sum(acquire, release), torch.randn(3, 10)) == {"Y"}


def test_a_lock_released_by_a_plain_store_races_on_the_lock_and_on_what_it_protects():
    assert racing_buffers(locked_sum("acquire", "release", plain_release=True), torch.randn(3, 10)) == {"Y", "Lock"}


@triton.jit
def _last_one_adds_up(
    X, Partial, Count, Y, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, SEM: tl.constexpr, MODE: tl.constexpr
):
    pid, c = tl.program_id(0), tl.arange(0, BLOCK)
    part = tl.sum(tl.load(X + pid * BLOCK + c), 0)
    if MODE == "counts first":
        done = tl.atomic_add(Count, 1, sem=SEM)
        tl.store(Partial + pid, part)
    else:
        tl.store(Partial + pid, part)
        done = tl.atomic_add(Count, 1, sem=SEM)
    mine = PROGRAMS - 1
    if MODE == "first one":
        mine = 0
    if done == mine:
        tl.store(Y, tl.sum(tl.load(Partial + tl.arange(0, PROGRAMS)), 0))
        if MODE == "resets":
            tl.store(Count, 0)


def last_one_adds_up(mode: str, sem: str = "acq_rel") -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        partial, y = torch.zeros(4, device=x.device), torch.zeros(1, device=x.device)
        count = torch.zeros(1, dtype=torch.int32, device=x.device)
        _last_one_adds_up[(4,)](x, partial, count, y, 16, 4, sem, mode)
        return y

    return stub


@pytest.mark.parametrize("mode", ["", "resets"])
def test_the_last_program_by_a_counter_may_read_what_all_have_written(mode):
    assert racing_buffers(last_one_adds_up(mode), torch.randn(64)) == set()


@pytest.mark.parametrize("mode", ["counts first", "first one"])
def test_a_counter_that_says_too_early_that_all_is_written_does_not_help(mode):
    assert racing_buffers(last_one_adds_up(mode), torch.randn(64)) == {"Partial"}


def test_a_relaxed_counter_does_not_publish_what_was_written_before_it():
    assert racing_buffers(last_one_adds_up("", sem="relaxed"), torch.randn(64)) == {"Partial"}


@triton.jit
def _hands_over(X, Flag, Y, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    pid, c = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(Y + c, tl.load(X + c) * 2.0)
        if ATOMIC:
            tl.atomic_xchg(Flag, 1)
        else:
            tl.store(Flag, 1)
    else:
        if ATOMIC:
            while tl.atomic_add(Flag, 0) == 0:
                pass
        else:
            while tl.load(Flag, volatile=True) == 0:
                pass
        tl.store(Y + pid * BLOCK + c, tl.load(Y + c) + 1.0)


def hands_over(atomic: bool) -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        flag, y = torch.zeros(1, dtype=torch.int32, device=x.device), torch.empty(48, device=x.device)
        _hands_over[(3,)](x, flag, y, 16, atomic)
        return y

    return stub


def test_a_flag_that_is_set_and_read_atomically_hands_memory_over():
    assert racing_buffers(hands_over(atomic=True), torch.randn(16)) == set()


def test_a_flag_that_is_stored_plainly_hands_nothing_over():
    assert racing_buffers(hands_over(atomic=False), torch.randn(16)) == {"Flag", "Y"}


@triton.jit
def _tickets(X, Y, Ticket, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    place = tl.atomic_add(Ticket, SCALE)
    tl.store(Y + place * BLOCK + c, tl.load(X + tl.program_id(0) * BLOCK + c))


@pytest.mark.parametrize(("step", "racing"), [(1, set()), (0, {"Y"})])
def test_places_drawn_from_a_counter_are_disjoint_only_if_it_counts(step, racing):
    def stub(x: Tensor) -> Tensor:
        ticket = torch.zeros(1, dtype=torch.int32, device=x.device)
        y = torch.zeros(48, device=x.device)
        _tickets[(3,)](x, y, ticket, step, 16)
        return y

    assert racing_buffers(stub, torch.randn(48)) == racing


@triton.jit
def _same_scale(Y, Out, READERS: tl.constexpr):
    pid = tl.program_id(0)
    if pid < 2:
        tl.store(Y, 3.0)
    if pid < READERS:
        tl.store(Out + pid, tl.load(Y))


def same_scale(readers: int) -> Callable[[Tensor], Tensor]:
    def stub(out: Tensor) -> Tensor:
        y = torch.zeros(1, device=out.device)
        _same_scale[(4,)](y, out, readers)
        return y

    return stub


@pytest.mark.parametrize("readers", [0, 2])
def test_programs_may_store_one_value_together_and_read_their_own(readers):
    assert racing_buffers(same_scale(readers), torch.zeros(4)) == set()


def test_a_program_that_did_not_store_must_not_read_what_others_store_together():
    assert racing_buffers(same_scale(4), torch.zeros(4)) == {"Y"}


@triton.jit
def _rewrites(X, Seen, BLOCK: tl.constexpr):
    pid, c = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + c)
    tl.store(Seen + pid, tl.sum(x, 0))
    if pid == 0:
        tl.store(X + c, tl.maximum(x, 0.0))


def test_writing_what_others_read_races_even_if_the_value_stays():
    # The inputs are positive, so nothing changes: with other inputs the readers would see half of the change.
    def stub(x: Tensor) -> Tensor:
        seen = torch.zeros(3, device=x.device)
        _rewrites[(3,)](x, seen, 16)
        return seen

    assert racing_buffers(stub, torch.rand(16) + 1.0) == {"x"}


@triton.jit
def _adds_in_scope(X, Sum, BLOCK: tl.constexpr, SCOPE: tl.constexpr):
    tl.atomic_add(Sum, tl.sum(tl.load(X + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0), scope=SCOPE)


@pytest.mark.parametrize(("scope", "racing"), [("gpu", set()), ("sys", set()), ("cta", {"Sum"})])
def test_an_atomic_of_one_programs_scope_is_no_atomic_to_the_others(scope, racing):
    def stub(x: Tensor) -> Tensor:
        total = torch.zeros(1, device=x.device)
        _adds_in_scope[(3,)](x, total, 16, scope)
        return total

    assert racing_buffers(stub, torch.randn(48)) == racing


@triton.jit
def _pairs(X, Y, BLOCK: tl.constexpr, DISTINCT: tl.constexpr):
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    place = c if DISTINCT else c // 2
    tl.store(Y + pid * BLOCK + place, tl.load(X + c))  # write


def pairs(distinct: bool) -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        y = torch.zeros(32, device=x.device)
        _pairs[(2,)](x, y, 16, distinct)
        return y

    return stub


def test_lanes_of_one_store_that_disagree_are_no_race_but_a_finding_of_their_own():
    (finding,) = found(pairs(distinct=False), torch.randn(16))
    assert finding.kind is FindingKind.DUPLICATE_LANES
    assert (finding.buffer, finding.offset, finding.lane) == ("Y", 0, (0,))
    assert finding.variables == ("pid", "place")


def test_lanes_of_one_store_that_agree_or_differ_in_place_are_clean():
    assert found(pairs(distinct=True), torch.randn(16)) == []
    assert found(pairs(distinct=False), torch.ones(16)) == []


@triton.jit
def _never_releases(Y, Lock):
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    tl.store(Y, tl.load(Y) + 1.0)


def test_a_lock_that_is_never_released_ends_the_run_with_an_error():
    def stub(y: Tensor) -> None:
        _never_releases[(2,)](y, torch.zeros(1, dtype=torch.int32, device=y.device))

    with pytest.raises(LaunchError, match=r"program \(1, 0, 0\) waits forever for element 0 of Lock"):
        execute(stub, (torch.zeros(1),))


@triton.jit
def _in_turn(X, Y, Turn, BLOCK: tl.constexpr, SEM: tl.constexpr, BACKWARDS: tl.constexpr):
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    turn = pid
    if BACKWARDS:
        turn = tl.num_programs(0) - 1 - pid
    while tl.atomic_add(Turn, 0, sem=SEM) < turn:
        pass
    tl.store(Y + c, tl.load(Y + c) + tl.load(X + pid * BLOCK + c))
    tl.atomic_add(Turn, 1)


def in_turn(sem: str, backwards: bool = False) -> Callable[[Tensor], Tensor]:
    def stub(x: Tensor) -> Tensor:
        turn, y = torch.zeros(1, dtype=torch.int32, device=x.device), torch.zeros(16, device=x.device)
        _in_turn[(3,)](x, y, turn, 16, sem, backwards)
        return y

    return stub


@pytest.mark.parametrize(("sem", "racing"), [("acquire", set()), ("relaxed", {"Y"})])
def test_programs_that_wait_for_their_turn_are_ordered_if_the_look_acquires(sem, racing):
    assert racing_buffers(in_turn(sem), torch.randn(48)) == racing


def test_waiting_for_a_later_program_ends_with_an_error_instead_of_never():
    with pytest.raises(LaunchError, match=r"program \(0, 0, 0\) waits forever"):
        execute(in_turn("acquire", backwards=True), (torch.randn(48),))


@triton.jit
def _first_row_or_add(X, Sum, Lock, Count, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N)
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    if tl.load(Count) == 0:
        tl.atomic_xchg(Count, 1)
    else:
        x += tl.load(Sum + c, mask=c < N)
    tl.store(Sum + c, x, mask=c < N)
    tl.debug_barrier()
    tl.atomic_xchg(Lock, 0)


def test_a_counter_under_a_lock_may_be_read_plainly_and_spares_the_zeros():
    # As layer norm's backward does it: the sum is `empty`, and the first program under the lock stores into it.
    def stub(x: Tensor) -> Tensor:
        lock, total = torch.zeros(2, dtype=torch.int32, device=x.device), torch.empty(x.shape[1], device=x.device)
        _first_row_or_add[(x.shape[0],)](x, total, lock, lock[1:], x.shape[1], 16)
        return total

    assert found(stub, torch.randn(4, 10)) == []
