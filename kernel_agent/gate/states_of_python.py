"""States of the interpreter, of the process and of Python's own library: what a file could leave changed in a program.

Each is a name that a verdict can say and what it is now. What lives in a context, as Triton's allocator, the settings
of NumPy's printing and of torch's configurations do, is looked at as one kind of thing, wherever it was defined.
"""

from __future__ import annotations

import atexit
import codecs
import contextvars
import copyreg
import faulthandler
import gc
import locale
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from triton.runtime import _allocation

from kernel_agent.gate.allocators import told_of_allocator

FILTERS = "warnings.filters"
LOGGER = "logging.getLogger"
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_ERRORS = ("strict", "ignore", "replace", "xmlcharrefreplace", "backslashreplace", "namereplace", "surrogateescape")
"""Handlers of text that cannot be encoded, which whoever registers one of these names exchanges for all."""


def states_of_python() -> Iterator[tuple[str, Any]]:
    """All of them by name."""
    yield from _of_interpreter()
    yield from _of_process()
    yield from _of_library()
    yield from _of_context()


def _of_interpreter() -> Iterator[tuple[str, Any]]:
    yield "what runs at exit", atexit._ncallbacks()
    yield "gc.callbacks", tuple(gc.callbacks)
    yield "gc.isenabled()", gc.isenabled()
    yield "gc.get_threshold()", gc.get_threshold()
    yield "gc.get_debug()", gc.get_debug()
    yield "sys.gettrace()", sys.gettrace()
    yield "sys.getprofile()", sys.getprofile()
    yield "threading.gettrace()", threading.gettrace()
    yield "threading.getprofile()", threading.getprofile()
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is not None:
        yield "sys.monitoring", tuple(monitoring.get_tool(number) for number in range(6))
    for name in ("meta_path", "path_hooks", "path", "argv"):
        yield f"sys.{name}", tuple(getattr(sys, name))
    for name in ("excepthook", "unraisablehook", "displayhook", "stdout", "stderr", "stdin", "dont_write_bytecode"):
        yield f"sys.{name}", getattr(sys, name)
    yield "sys.getrecursionlimit()", sys.getrecursionlimit()
    yield "sys.getswitchinterval()", sys.getswitchinterval()
    if hasattr(sys, "get_int_max_str_digits"):  # not in the first releases of Python 3.10
        yield "sys.get_int_max_str_digits()", sys.get_int_max_str_digits()
    yield "faulthandler.is_enabled()", faulthandler.is_enabled()


def _of_process() -> Iterator[tuple[str, Any]]:
    yield "os.environ", dict(os.environ)
    yield "os.getcwd()", os.getcwd()
    yield "signal handlers", tuple(signal.getsignal(number) for number in sorted(signal.valid_signals()))
    yield "blocked signals", frozenset(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    yield "running threads", frozenset(sys._current_frames())
    yield "resource limits", tuple(resource.getrlimit(number) for number in range(resource.RLIMIT_NOFILE + 1))
    yield "the processors it may use", frozenset(os.sched_getaffinity(0))
    yield "its priority", os.getpriority(os.PRIO_PROCESS, 0)
    yield "running timers", tuple(signal.getitimer(which)[0] > 0 for which in _TIMERS)
    yield "locale.setlocale()", locale.setlocale(locale.LC_ALL)
    yield "time.tzname", time.tzname
    yield "socket.getdefaulttimeout()", socket.getdefaulttimeout()
    mask = os.umask(0o077)
    os.umask(mask)
    yield "os.umask()", mask


def _of_library() -> Iterator[tuple[str, Any]]:
    yield FILTERS, tuple(warnings.filters)
    yield "warnings.showwarning", warnings.showwarning
    yield "copyreg.dispatch_table", _entries(copyreg.dispatch_table)
    yield "handlers of codecs", tuple(map(codecs.lookup_error, _ERRORS))
    yield "logging.disable()", logging.root.manager.disable
    yield "logging.root", _of_logger(logging.root)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            yield f"{LOGGER}({name!r})", _of_logger(logger)
    decimal: Any = sys.modules.get("decimal")
    if decimal is not None:
        yield "decimal.getcontext()", _rules(decimal.getcontext())
        yield "decimal.DefaultContext", _rules(decimal.DefaultContext)
    processes: Any = sys.modules.get("multiprocessing.context")
    if processes is not None:
        yield "multiprocessing.get_start_method()", processes._default_context.get_start_method(allow_none=True)


def _of_context() -> Iterator[tuple[str, Any]]:
    """Variables of the context: one that was set to what it is without is as it was."""
    for variable, value in contextvars.copy_context().items():
        known = variable is _allocation._allocator or variable.name == "decimal_context"  # by what is in them
        if not known and value is not _usual(variable):
            yield f"the context's {variable.name}", value
    yield "triton.set_allocator()", told_of_allocator(_allocation._allocator.get())
    yield "triton's allocator of profiles", told_of_allocator(_allocation._profile_allocator.get())


def _usual(variable: contextvars.ContextVar[Any]) -> Any:
    """What a variable is in a context where nobody has set it; without any, itself."""
    try:
        return contextvars.Context().run(variable.get)
    except LookupError:
        return variable


def _entries(table: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(part for entry in table.items() for part in entry)


def _of_logger(logger: logging.Logger) -> tuple[Any, ...]:
    return (logger.level, tuple(logger.handlers), tuple(logger.filters), logger.disabled, logger.propagate)


def _rules(context: Any) -> tuple[Any, ...]:
    """What a context of decimals computes by; the flags are what it has met."""
    return (context.prec, context.rounding, context.Emin, context.Emax, context.clamp, str(context.traps))
