"""Whether a backward asks where it runs: frames of its callers, modules that are loaded, arguments, environment, time.

One that is honest when it is judged does nothing wrong in any process of the gate, so this is told by its text. What
`backward` computes may hang on what it is given and on the machine; it has no business with who calls it. Names that a
statement makes of such an answer are followed to `backward`, so that a file may look at its environment for something
that no gradient hangs on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_TELLING = frozenset(
    {
        *("__main__", "_ctypes", "_thread", "asyncio", "bdb", "builtins", "cProfile", "code", "codeop", "concurrent"),
        *("ctypes", "dis", "faulthandler", "fcntl", "fileinput", "gc", "getpass", "glob", "importlib", "inspect", "io"),
        *("linecache", "mmap", "multiprocessing", "os", "pathlib", "pdb", "pkgutil", "platform", "posix", "profile"),
        *("psutil", "pwd", "resource", "runpy", "shutil", "site", "socket", "subprocess", "symtable", "sys"),
        *("sysconfig", "tempfile", "trace", "traceback", "tracemalloc", "zipimport"),
    }
)
"""Modules that tell of the program that they are called in, or read files, which hold that too."""
_OF_MACHINES = frozenset(
    {
        *("sys.maxsize", "sys.version_info", "sys.float_info", "sys.byteorder", "sys.stderr", "sys.stdout"),
        *("sys.stderr.write", "sys.stdout.write", "sys.getrecursionlimit", "sys.setrecursionlimit", "os.cpu_count"),
    }
)
"""What of them tells of the machine alone, or is asked for nothing."""
_OF_THREADS = frozenset(
    {"enumerate", "current_thread", "main_thread", "settrace", "setprofile", "gettrace", "getprofile"}
)
_PARTS = frozenset({"gate", "ir", "oracle", "sandbox", "agent", "bench", "compiler"})
"""Packages of kernel_agent that run where something is judged, and not where it is used."""
_BUILT_IN = frozenset({"globals", "locals", "vars", "eval", "exec", "compile", "__import__", "open", "input", "id"})
"""Functions of Python that tell it, or run what no reader of the text sees."""
_BY_NAME = frozenset({"getattr", "setattr", "delattr", "hasattr", "attrgetter", "methodcaller", "import_module"})
_DUNDERS = frozenset(
    {
        *("__version__", "__init__", "__post_init__", "__call__", "__doc__", "__len__", "__getitem__", "__class__"),
        *("__name__", "__qualname__", "__defaults__", "__kwdefaults__"),
    }
)
"""Special attributes that tell of an object alone."""
_OF_FRAMES = frozenset(
    {
        *("f_back", "f_code", "f_globals", "f_locals", "f_builtins", "f_lineno", "gi_frame", "cr_frame"),
        *("tb_frame", "tb_next", "_getframe", "_current_frames", "_C", "_dynamo"),
    }
)
"""Attributes that lead to frames, and into torch below its functions, which knows the modes that watch it."""
_LEADS = frozenset({"sys", "os", "inspect", "gc", "builtins", "traceback", "threading", "importlib", "ctypes"})
"""Modules that others hold under these names, as torch does."""


@dataclass(frozen=True)
class Asked:
    """A place where a file asks for its surroundings, and `backward` or `forward` hangs on it."""

    what: str
    """As `sys.modules`."""
    line: int


def asks_where(text: str, users_lines: int) -> Asked | None:
    """The first such place of a file below the lines that are the user's own; None where there is none."""
    tree = ast.parse(text)
    own = [node for node in tree.body if node.lineno > users_lines]
    origins = _origins(tree)
    parts = [_Part.of(node, origins) for node in own]
    defined = {name for part in parts for name in part.binds if part.runs}
    tainted: dict[str, Asked] = {}
    while True:
        known = len(tainted)
        for part in parts:
            asked = part.asked or next((tainted[name] for name in part.uses if name in tainted), None)
            if asked is None:
                continue
            if part.is_function or part.is_quiet(defined):
                tainted |= {name: asked for name in part.binds if name not in tainted}
            else:
                tainted.setdefault("backward", asked)
        if len(tainted) == known:
            return tainted.get("backward") or tainted.get("forward")


@dataclass(frozen=True)
class _Part:
    """A statement at the top level."""

    binds: frozenset[str]
    uses: frozenset[str]
    """Names that it reads."""
    asked: Asked | None
    is_function: bool
    """A function or a class runs when it is used; any other statement does now."""
    runs: bool
    """Whether what it binds may be changed or called by statements after it."""
    assigns: bool
    """Whether it only gives names values."""

    @classmethod
    def of(cls, node: ast.stmt, origins: dict[str, str]) -> _Part:
        """Look at a statement; `origins` are those of the names of modules."""
        parts = list(ast.walk(node))
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        imported = isinstance(node, (ast.Import, ast.ImportFrom))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
        names |= {part.name for part in parts if isinstance(part, (ast.FunctionDef, ast.ClassDef))}
        return cls(
            binds=frozenset({node.name} if function else names),  # type: ignore[attr-defined]
            uses=frozenset(p.id for p in parts if isinstance(p, ast.Name) and isinstance(p.ctx, ast.Load)) - {*origins},
            asked=next(_asked(node, origins), None),
            is_function=function,
            runs=function or not imported,
            assigns=isinstance(node, (ast.Assign, ast.AnnAssign)) and all(isinstance(t, ast.Name) for t in targets),
        )

    def is_quiet(self, defined: set[str]) -> bool:
        """Whether nothing but the names that it binds can hold what it was told: it calls nothing of the file."""
        return self.assigns and self.uses.isdisjoint(defined)


def _origins(tree: ast.AST) -> dict[str, str]:
    """What names that are imported anywhere stand for, as `m` for `sys.modules`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: _whole(alias) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _whole(alias: ast.alias) -> str:
    return alias.name if alias.asname else alias.name.partition(".")[0]


def _asked(node: ast.AST, origins: dict[str, str]) -> Iterator[Asked]:
    """Every place in a part of a file that asks for surroundings."""
    inside = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    inside |= {id(part) for call in ast.walk(node) if _writes(call) for part in ast.walk(call)}
    for part in sorted(ast.walk(node), key=lambda one: (getattr(one, "lineno", 0), getattr(one, "col_offset", 0))):
        line = getattr(part, "lineno", 0)
        if isinstance(part, ast.ImportFrom) and any(alias.name == "*" for alias in part.names):
            if _tells([*str(part.module).split("."), "*"]):
                yield Asked(f"all of {part.module}", line)
        elif isinstance(part, (ast.Name, ast.Attribute)) and id(part) not in inside:
            what = _asks(part, origins)
            if what:
                yield Asked(what, line)
        elif isinstance(part, ast.Call):
            what = _by_computed_name(part)
            if what:
                yield Asked(what, line)


def _asks(node: ast.Name | ast.Attribute, origins: dict[str, str]) -> str:
    """What an expression with all its attributes asks for; empty where that is none of the surroundings."""
    attributes: list[str] = []
    base: ast.expr = node
    while isinstance(base, ast.Attribute):
        attributes.insert(0, base.attr)
        base = base.value
    said = ".".join([ast.unparse(base) if isinstance(base, ast.Name) else "", *attributes]).lstrip(".")
    for name in attributes:
        private = name.startswith("__") and name.endswith("__") and name not in _DUNDERS
        if private or name in _OF_FRAMES:
            return said
    if not isinstance(base, ast.Name):
        return ""
    origin = origins.get(base.id)
    if origin is None:
        return base.id if base.id in _BUILT_IN or (base.id.startswith("__") and base.id != "__doc__") else ""
    chain = [*origin.split("."), *attributes]
    return ".".join(chain) if _tells(chain) else ""


def _tells(chain: list[str]) -> bool:
    """Whether `a.b.c`, which begins with a module, is one of the surroundings or leads there."""
    if ".".join(chain) in _OF_MACHINES or chain[:2] == ["sys", "version_info"]:
        return False
    if chain[0] == "threading":
        return not _OF_THREADS.isdisjoint(chain[1:])
    if chain[0] == "kernel_agent":
        return len(chain) > 1 and chain[1] in _PARTS
    if chain[0] in _TELLING:
        return True
    return not _LEADS.isdisjoint(chain[1:])


def _writes(node: ast.AST) -> bool:
    """Whether a file is opened to be written: where it lies is told to nobody."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"):
        return False
    modes = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and str(mode.value)[:1] in ("w", "a", "x") for mode in modes)


def _by_computed_name(call: ast.Call) -> str:
    """Whether an attribute is looked up by a name that no reader of the text knows, or by one that leads there."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in _BY_NAME:
        return ""
    names: Iterable[ast.expr] = call.args[1:2] if function.endswith("attr") else call.args
    for name in names:
        said = name.value if isinstance(name, ast.Constant) else None
        if not isinstance(said, str):
            return f"{function} of a name that is computed"
        parts = said.split(".")
        if not _LEADS.union(_OF_FRAMES).isdisjoint(parts) or any(
            p.startswith("__") and p not in _DUNDERS for p in parts
        ):
            return f"{function} of {said}"
    return ""
