"""What counts as left changed by a candidate: in this process, where each change is taken back, and in verdicts."""

from __future__ import annotations

import atexit
import contextvars
import gc
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
import triton
from triton.runtime import _allocation

from kernel_agent.gate import GateOptions, Status, check
from kernel_agent.gate.lasting_state import LastingState
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.userfile import read_file

PAIRS = Path(__file__).parent / "pairs"
QUICK = GateOptions(seeds=(0,), odd_sizes=0, max_cases=2, values=())


@pytest.fixture
def settled():
    """Looks at full sizes that an earlier verdict began may end behind it, and their threads with them."""
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(60.0)


@pytest.mark.usefixtures("settled")
def test_nothing_is_changed_by_computing():
    # Executors call torch and Triton between the two looks: none of that may be laid at a candidate's door.
    state = LastingState()
    x = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        x.exp()
    x.sum().backward()
    assert state.changed() == ()


def test_a_setting_is_named_until_it_is_put_back(monkeypatch):
    state = LastingState()
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", "x.so")
        assert state.changed() == ("os.environ",)
    assert state.changed() == ()


def test_a_module_that_is_imported_beside_hides_no_exit_handler():
    # What torch imports late is excused. Any import was once: the look at NumPy's generators made one itself.
    state, handler = LastingState(), print
    sys.modules["imported_beside"] = ModuleType("imported_beside")
    atexit.register(handler)
    try:
        assert state.changed() == ("what runs at exit",)
    finally:
        atexit.unregister(handler)
        del sys.modules["imported_beside"]


def test_what_is_added_to_a_list_of_hooks_is_named():
    # The list is the same object before and after: only its members tell.
    state, hook = LastingState(), print
    gc.callbacks.append(hook)
    triton.knobs.runtime.launch_enter_hook.calls.append(hook)
    try:
        assert state.changed() == ("gc.callbacks", "triton.knobs.runtime.launch_enter_hook")
    finally:
        gc.callbacks.remove(hook)
        triton.knobs.runtime.launch_enter_hook.calls.remove(hook)
    assert state.changed() == ()


@pytest.mark.parametrize(
    ("change", "back", "said"),
    [
        (lambda: gc.set_threshold(10**9), lambda: gc.set_threshold(700, 10, 10), "gc.get_threshold()"),
        (lambda: logging.disable(50), lambda: logging.disable(0), "logging.disable()"),
        (lambda: os.umask(0o777), lambda: os.umask(0o022), "os.umask()"),
        (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False), "torch.set_flush_denormal()"),
        (
            lambda: torch.backends.cuda.enable_flash_sdp(False),
            lambda: torch.backends.cuda.enable_flash_sdp(True),
            "torch.backends.cuda.flash_sdp_enabled()",
        ),
        (
            lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
            lambda: torch.set_autocast_dtype("cuda", torch.float16),
            "torch.get_autocast_dtype('cuda')",
        ),
        (
            lambda: torch._C._set_multithreading_enabled(False),
            lambda: torch._C._set_multithreading_enabled(True),
            "torch.autograd.set_multithreading_enabled()",
        ),
    ],
    ids=["collector", "log", "umask", "denormals", "attention", "autocast", "engine"],
)
def test_what_slows_silences_or_changes_the_users_program_is_named(change, back, said):
    # None of these has a hook or a name that is replaced: each was green before it was looked at.
    old_mask, old_threshold = os.umask(0o022), gc.get_threshold()
    try:
        state = LastingState()
        change()
        assert state.changed() == (said,)
        back()
    finally:
        os.umask(old_mask)
        gc.set_threshold(*old_threshold)


def test_a_variable_of_the_context_is_named_wherever_it_was_defined():
    # No module holds its value: neither Triton's allocator nor a setting of torch's compiler is an attribute.
    state, variable = LastingState(), contextvars.ContextVar("of_some_library", default=0)
    variable.set(1)
    assert state.changed() == ("the context's of_some_library",)
    variable.set(0)
    assert state.changed() == ()


def test_an_allocator_may_stay_that_makes_a_tensor_and_does_nothing_else():
    # Kernels with tensor descriptors need one, and Triton has no way to take it back.
    device, calls, state = "cpu", [], LastingState()
    try:
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
        assert state.changed() == ()
        triton.set_allocator(lambda size, align, stream: calls.append(size) or torch.empty(size, device=device))
        assert state.changed() == ("triton.set_allocator()",)
        triton.set_allocator(lambda size, align, stream: None)
        assert state.changed() == ("triton.set_allocator()",), "it is no memory"
    finally:
        triton.set_allocator(_allocation._NULL_ALLOCATOR)
    assert state.changed() == ()


def test_an_allocator_may_ask_a_tensor_for_its_device_and_not_write_to_it():
    # `device=x.device` is how people write it. What else it did would be done at every launch.
    x, state = torch.zeros(4), LastingState()

    def asks(size: int, alignment: int, stream: int | None):
        return torch.empty(size, dtype=torch.int8, device=x.device)

    def resizes(size: int, alignment: int, stream: int | None):
        return torch.empty(size, out=x, device=x.device)

    def adds(size: int, alignment: int, stream: int | None):
        nonlocal x
        x += 1
        return torch.empty(size, device=x.device)

    try:
        triton.set_allocator(asks)
        assert state.changed() == ()
        for hostile in (resizes, adds):
            triton.set_allocator(hostile)
            assert state.changed() == ("triton.set_allocator()",), hostile.__name__
    finally:
        triton.set_allocator(_allocation._NULL_ALLOCATOR)


def test_a_logger_that_is_made_anew_belongs_to_who_made_it():
    state = LastingState()
    logging.getLogger("made_anew").setLevel(50)
    assert state.changed() == ()


def test_lowered_limits_and_fewer_processors_are_named():
    # Nothing fails at once: the program cannot open its 98th file some hours later.
    state, soft, cpus = LastingState(), resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (97, soft[1]))
        os.sched_setaffinity(0, {min(cpus)})
        named = {"resource limits"} | ({"the processors it may use"} if len(cpus) > 1 else set())
        assert set(state.changed()) == named
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft)
        os.sched_setaffinity(0, cpus)
    assert state.changed() == ()


@pytest.mark.parametrize(
    ("look", "put", "said"),
    [
        (torch.get_rng_state, torch.set_rng_state, "torch's random numbers"),
        (random.getstate, random.setstate, "Python's random numbers"),
        (numpy.random.get_state, numpy.random.set_state, "NumPy's random numbers"),
    ],
    ids=["torch", "python", "numpy"],
)
def test_a_generator_that_is_put_where_it_stood_is_named(look, put, said):
    # Compared before and after all calls, it stands where it stood; so it is moved on before the call.
    stood, state, forward = look(), LastingState(), LastingState()
    state.attended(lambda: put(stood))()
    assert state.changed() == (said,)
    forward.attended(lambda: put(stood), may_draw=True)()
    assert forward.changed() == (), "dropout's forward draws a seed"


def test_a_thread_counts_while_it_runs():
    state, end = LastingState(), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert state.changed() == ("running threads",)
    end.set()
    thread.join()
    assert state.changed() == ()


def test_what_changes_inside_of_an_excused_block_is_nobodys(monkeypatch):
    state = LastingState()
    with monkeypatch.context() as patch:
        with state.excused():
            patch.setattr(os, "environ", {**os.environ, "A": "b"})
        assert state.changed() == ()
        patch.setattr(gc, "callbacks", [*gc.callbacks, print])
        assert state.changed() == ("gc.callbacks",), "what changes outside still counts"


def test_what_the_users_own_forward_changes_is_no_candidates_doing(tmp_path, sandbox):
    # A stub that sets a flag when it runs does so with any backward: without the excuse all of them would be red.
    path = tmp_path / "softmax.py"
    shutil.copy(PAIRS / "softmax.py", path)
    text = path.read_text()
    line = "    torch.backends.cuda.matmul.allow_tf32 = True\n"
    start = text.index("\n", text.index("\ndef forward(") + 1) + 1
    path.write_text(text[:start] + line + text[start:])
    spec = describe(read_file(path), sandbox)
    verdict = check(spec, spec.facts.source, sandbox, QUICK, truths=Truths(spec, sandbox))
    assert verdict.green, verdict.message
    start = spec.facts.source.index("\n", spec.facts.source.index("\ndef backward(") + 1) + 1
    both = spec.facts.source[:start] + "    torch.set_num_threads(3)\n" + spec.facts.source[start:]
    verdict = check(spec, both, sandbox, QUICK, truths=Truths(spec, sandbox))
    assert verdict.status is Status.TAMPERED, verdict.message
    assert "get_num_threads" in verdict.message


def test_a_candidates_own_forward_is_not_excused(judge):
    source = judge.source("softmax")
    start = source.index("\n", source.index("\ndef forward(") + 1) + 1
    text = source[:start] + "    torch.backends.cuda.matmul.allow_tf32 = True\n" + source[start:]
    verdict = judge.check_source("softmax", text, QUICK)
    assert verdict.status is Status.TAMPERED, verdict.message


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_honest_backwards_leave_nothing_changed(judge, name):
    assert judge(name, options=QUICK).green


def test_parts_of_torch_that_it_imports_late_are_nobodys_doing():
    # Derived backwards add gradients by `torch.stack`: of tensors without data it imports what overrides operators.
    text = (
        "import torch\nfrom kernel_agent.gate.lasting_state import LastingState\nstate = LastingState()\n"
        "torch.stack((torch.empty(3, device='meta'),) * 2)\nprint(*state.changed())\n"
    )
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "overrides" not in ran.stdout
