"""Which names of Python, its library, torch and this package tell a program where it runs: lists, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_agent.gate.origins import LOGGER, is_special

_MODULES = frozenset(
    {
        *("__main__", "_ctypes", "_thread", "asyncio", "bdb", "builtins", "cProfile", "code", "codeop", "concurrent"),
        *("ctypes", "dis", "faulthandler", "fcntl", "fileinput", "gc", "getpass", "glob", "importlib", "inspect", "io"),
        *("linecache", "mmap", "multiprocessing", "os", "pathlib", "pdb", "pkgutil", "platform", "posix", "profile"),
        *("psutil", "pwd", "resource", "runpy", "shutil", "site", "socket", "subprocess", "symtable", "sys"),
        *("sysconfig", "tempfile", "trace", "traceback", "tracemalloc", "zipimport"),
    }
)
"""Modules that tell of the program that they are called in, or read files, which hold that too."""
_FREE = frozenset(
    {
        *("sys.maxsize", "sys.version_info", "sys.version", "sys.float_info", "sys.byteorder", "sys.platform"),
        *("sys.stderr.write", "sys.stdout.write", "sys.stderr.flush", "sys.stdout.flush", "os.cpu_count"),
        *("sys.getrecursionlimit", "sys.setrecursionlimit", "importlib.metadata.version", "io.StringIO", "io.BytesIO"),
        *("platform.machine", "platform.system", "platform.python_version", "torch._dynamo.disable"),
        *("inspect.signature", "inspect.Signature", "inspect.Parameter", "inspect.getfullargspec", "inspect.cleandoc"),
        *("inspect.isfunction", "inspect.isclass"),
    }
)
"""What of them tells of the machine or of a function alone, or is asked for nothing."""
_STREAMS = frozenset({"sys.stderr", "sys.stdout"})
_OF_THREADS = frozenset(
    {"enumerate", "current_thread", "main_thread", "settrace", "setprofile", "gettrace", "getprofile"}
)
_OF_LOGGING = frozenset({"root", "Logger", "lastResort", "getHandlerByName", "getHandlerNames", "getLoggerClass"})
_OF_CODECS = frozenset({"register"})
"""It is told of every encoding that the program asks for, and no list says who was registered."""
_WRITES_LOGS = frozenset(
    {*("debug", "info", "warning", "warn", "error", "exception", "critical", "log"), *("setLevel", "addHandler")}
)
_PARTS = frozenset({"gate", "ir", "oracle", "sandbox", "agent", "bench", "compiler"})
"""Packages of kernel_agent that run where something is judged, and not where it is used."""
_BUILT_IN = frozenset({"globals", "locals", "vars", "eval", "exec", "compile", "open", "input"})
"""Functions of Python that tell it, or run what no reader of the text sees."""
BY_NAME = frozenset(
    {"getattr", "setattr", "delattr", "hasattr", "attrgetter", "methodcaller", "import_module", "__setattr__"}
)
"""Functions that are given the name of what they look up."""
_DUNDERS = frozenset(
    {
        *("__version__", "__init__", "__post_init__", "__call__", "__doc__", "__len__", "__getitem__", "__class__"),
        *("__name__", "__qualname__", "__defaults__", "__kwdefaults__", "__setitem__", "__contains__", "__iter__"),
        *("__next__", "__enter__", "__exit__", "__new__", "__eq__", "__hash__", "__setattr__", "__wrapped__"),
        "__annotations__",
    }
)
"""Special names that tell of an object alone."""
_OF_FRAMES = frozenset(
    {
        *("f_back", "f_code", "f_globals", "f_locals", "f_builtins", "f_lineno", "gi_frame", "cr_frame"),
        *("tb_frame", "tb_next", "_getframe", "_current_frames", "_C", "_dynamo", "_python_dispatch"),
        *("_get_current_function_mode", "_get_current_function_mode_stack", "findCaller", "loggerDict"),
        *("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
        *("_execution_engine", "queue_callback", "get_num_threads", "get_num_interop_threads", "device_caches"),
    }
)
"""Attributes that lead to frames, and into torch below its functions, which knows the modes that watch it, whether its
engine runs, and on how many threads; and to what Triton has compiled of a kernel for a device, which is nothing where
its text is executed."""
_LEADS = frozenset({"sys", "os", "inspect", "gc", "builtins", "traceback", "threading", "importlib", "ctypes"})
"""Modules that others hold under these names, as torch does."""


def tells(chain: Sequence[str]) -> bool:
    """Whether `a.b.c`, which begins with a module or a name of Python's own, tells where it runs or leads there."""
    if any(".".join(chain[:end]) in _FREE for end in range(1, len(chain) + 1)) or ".".join(chain) in _STREAMS:
        return False
    first, rest = chain[0], chain[1:]
    if tuple(chain[: len(LOGGER)]) == LOGGER:
        return not _WRITES_LOGS.issuperset(chain[len(LOGGER) :])
    if first == "threading":
        return not _OF_THREADS.isdisjoint(rest)
    if first == "logging":
        return not _OF_LOGGING.isdisjoint(rest)
    if first == "codecs":
        return not _OF_CODECS.isdisjoint(rest)
    if first == "kernel_agent":
        return not _PARTS.isdisjoint(rest[:1])
    if first in _MODULES or any(map(leads, rest)):
        return True
    return not rest and (first in _BUILT_IN or (is_special(first) and first not in _DUNDERS - {"__name__"}))


def leads(name: str) -> bool:
    """Whether an attribute of whatever object tells it or leads to a module that does."""
    return name in _LEADS or name in _OF_FRAMES or (is_special(name) and name not in _DUNDERS)
