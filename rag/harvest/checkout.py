"""`Checkout`: the Python files of a folder, parsed when they are wanted, and which file an import means."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kernel_agent.errors import InputError
from kernel_agent.pairs.syntax import parse
from rag.harvest.module import Module

LARGEST = 1_000_000
"""Bytes of a file that is read; larger ones are generated."""

PASSED_OVER = frozenset({"build", "dist", "node_modules", "site-packages", "venv", "env", "__pycache__"})
"""Folders whose files are not the checkout's own; hidden folders are passed over, too."""

ELSEWHERE = frozenset(
    {*sys.stdlib_module_names, "torch", "triton", "numpy", "einops", "packaging", "transformers", "jax", "cuda"}
)
"""Packages that an import always takes from outside, even where a folder of the checkout has their name."""


class Checkout:
    """A folder with source code. Links are not followed."""

    def __init__(self, root: Path) -> None:
        """Raises `InputError` where there is no such folder."""
        if not root.is_dir():
            raise InputError("there is no such folder", path=root, remedy="name a folder with a checkout")
        self.root = root.resolve()
        self.large: list[str] = []
        self.files = tuple(sorted(self._walk()))
        self._modules: dict[str, Module] = {}
        self._known = frozenset(self.files)
        self._folders = {parent.as_posix() for file in self.files for parent in PurePosixPath(file).parents}
        self._named = self._by_name()

    def _walk(self) -> Iterator[str]:
        for folder, inner, names in os.walk(self.root, followlinks=False):
            inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in PASSED_OVER)
            for name in names:
                path = Path(folder) / name
                if not name.endswith(".py") or path.is_symlink() or not path.is_file():
                    continue
                relative = path.relative_to(self.root).as_posix()
                if path.stat().st_size > LARGEST:
                    self.large.append(relative)
                else:
                    yield relative

    def _by_name(self) -> dict[str, list[str]]:
        """Files by every dotted name that an absolute import may give them."""
        found: dict[str, list[str]] = defaultdict(list)
        for file in self.files:
            for parts in {self._package_parts(file), *self._path_parts(file)}:
                if parts:
                    found[".".join(parts)].append(file)
        return found

    def _package_parts(self, file: str) -> tuple[str, ...]:
        """Its name below the outermost folder that is a package."""
        path = PurePosixPath(file)
        top = path.parent
        while (top / "__init__.py").as_posix() in self._known and top != PurePosixPath("."):
            top = top.parent
        return _dotted(path.relative_to(top))

    def _path_parts(self, file: str) -> Iterator[tuple[str, ...]]:
        """Its name by the path from the root, and from `src` or `python`, whether or not the folders are packages."""
        path = PurePosixPath(file)
        yield _dotted(path)
        if len(path.parts) > 1 and path.parts[0] in ("src", "python"):
            yield _dotted(path.relative_to(path.parts[0]))

    def text(self, file: str) -> str:
        """The text of a file. Raises `InputError` where it is no UTF-8, or may not be read."""
        try:
            return (self.root / file).read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            raise InputError("this is no UTF-8 text", path=self.root / file) from None
        except OSError as error:
            raise InputError(f"it cannot be read: {error.strerror}", path=self.root / file) from None

    def module(self, file: str) -> Module:
        """A parsed file, kept. Raises `InputError` where it is not Python."""
        if file not in self._modules:
            text = self.text(file)
            self._modules[file] = Module(file, text, parse(text, self.root / file))
        return self._modules[file]

    def absolute(self, dotted: str, importer: str) -> str | None:
        """The file that `import dotted` in `importer` means; None for what comes from outside of the checkout."""
        if dotted.partition(".")[0] in ELSEWHERE:
            return None
        candidates = self._named.get(dotted, [])
        if candidates:
            return max(candidates, key=lambda file: (_shared(file, importer), -len(file)))
        return self._at(PurePosixPath(importer).parent, dotted.split("."))  # a script beside its helpers

    def relative(self, level: int, dotted: str, importer: str) -> str | None:
        """The file that `from ...dotted import` with `level` dots means; None where there is none."""
        folder = PurePosixPath(importer).parent
        for _ in range(level - 1):
            folder = folder.parent
        return self._at(folder, dotted.split(".") if dotted else [])

    def inside(self, file: str, name: str) -> str | None:
        """The submodule `name` of a package whose `__init__.py` is `file`."""
        path = PurePosixPath(file)
        return self._at(path.parent, [name]) if path.name == "__init__.py" else None

    def owns(self, dotted: str) -> bool:
        """Whether the first part of an absolute name is a package or module of this checkout."""
        top = dotted.partition(".")[0]
        return top not in ELSEWHERE and (top in self._named or top in self._folders or f"src/{top}" in self._folders)

    def _at(self, folder: PurePosixPath, parts: list[str]) -> str | None:
        place = folder.joinpath(*parts)
        tries = [place / "__init__.py"] if not parts else [place.with_name(place.name + ".py"), place / "__init__.py"]
        return next((found.as_posix() for found in tries if found.as_posix() in self._known), None)


def _dotted(path: PurePosixPath) -> tuple[str, ...]:
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _shared(one: str, other: str) -> int:
    """Folders that two paths have in common."""
    count = 0
    for left, right in zip(PurePosixPath(one).parts[:-1], PurePosixPath(other).parts[:-1], strict=False):
        if left != right:
            break
        count += 1
    return count
