"""`PairMeta`: the literal META of a pair file, read from the syntax tree so that indexing never executes a file."""

from __future__ import annotations

import ast
import enum
import json
from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernel_agent.errors import InputError
from kernel_agent.pairs.syntax import parse

SCHEMA = 1
"""Version of the pair format that this package writes and the newest that it reads."""


class Gradient(str, enum.Enum):
    """Which gradient a pair's backward is held to."""

    TRUE = "true"
    """The derivative of what the forward kernel computes."""
    CUSTOM = "custom"
    """The derivative of `surrogate`: straight-through and clipped gradients."""


class PairMeta(BaseModel):
    """What META says. Only `grads` is needed to judge a pair; the rest describes it to readers and to retrieval."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    grads: tuple[str, ...] = Field(
        description="names of the forward's parameters whose gradients `backward` returns, in order"
    )
    slug: str = Field(default="", description="file name without suffix, unique in the dataset")
    family: str = Field(default="", description="folder of the dataset; `user` in delivered files")
    op: str = Field(default="", description="what is computed, such as `rms_norm`")
    schema_version: int = Field(default=SCHEMA, alias="schema", description="version of the pair format")
    techniques: tuple[str, ...] = Field(default=(), description="tags of how the backward is organised")
    saves: tuple[str, ...] = Field(
        default=(), description="tensors in `saved` that are not inputs, as 'name: dtype (dims)'"
    )
    dtypes: tuple[str, ...] = Field(default=(), description="floating dtypes the pair is meant for")
    nondiff_outputs: tuple[int, ...] = Field(default=(), description="positions of outputs without gradient")
    torch_ops: tuple[str, ...] = Field(default=(), description="computing torch functions that the backward may call")
    gradient: Gradient = Field(default=Gradient.TRUE, description="`custom`: `surrogate` defines the gradient")
    license: str = Field(default="", description="SPDX identifier")
    origin: str = Field(default="", description="`original`, or where the pair comes from")
    repository: str = Field(default="", description="name of the checkout that a harvested pair comes from")
    spills: str = Field(default="", description="why kernels may spill registers on sm_90 at BENCH")
    interpreter_ok: bool = Field(default=True, description="False: Triton's own interpreter cannot run it")


def read_meta(source: str) -> PairMeta:
    """Read META of a pair file without executing anything.

    META is assigned once, at module level, as a dict display or as `dict(name=literal, ...)`.
    Raises `InputError` with the line when it is missing, not literal, or lacks what a pair needs.
    """
    node = meta_node(parse(source))
    if node is None:
        raise InputError(
            "the pair file has no META", remedy='Add META = dict(slug="...", grads=("x",), ...) above the forward.'
        )
    try:
        values = _literal(node)
    except (ValueError, TypeError):
        raise InputError(
            "META is not literal",
            remedy="Write plain strings, numbers and tuples: META is read, never executed.",
            line=node.lineno,
        ) from None
    try:
        meta = PairMeta.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"META[{where!r}]: {first['msg']}", remedy="docs/pair-format.md lists the fields.", line=node.lineno
        ) from None
    if meta.schema_version > SCHEMA:
        raise InputError(
            f"META says schema {meta.schema_version}; this version of kernel-agent reads up to {SCHEMA}",
            remedy="Update kernel-agent.",
            line=node.lineno,
        )
    if not meta.grads:
        raise InputError(
            'META["grads"] is empty', remedy="Name the inputs whose gradients `backward` returns.", line=node.lineno
        )
    return meta


def declaring(head: str, names: Collection[str]) -> str:
    """The head of a pair file whose META declares computing torch functions too, beside those that it has.

    Raises `InputError` as `read_meta` does.
    """
    declared = read_meta(head).torch_ops
    if not set(names) - set(declared):
        return head
    listed = sorted({*declared, *names})
    shown = f"({', '.join(map(json.dumps, listed))}{',' if len(listed) == 1 else ''})"
    node = meta_node(parse(head))
    assert node is not None
    lines = [line.encode() for line in head.split("\n")]
    if isinstance(node, ast.Call):
        old = next((one.value for one in node.keywords if one.arg == "torch_ops"), None)
        opening, entry = (node.func.end_col_offset or 0) + 1, f"\n    torch_ops={shown},"
    else:
        assert isinstance(node, ast.Dict)
        pairs = zip(node.keys, node.values, strict=True)
        old = next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "torch_ops"), None)
        opening, entry = node.col_offset + 1, f'\n    "torch_ops": {shown},'
    if old is None:
        row = last = node.lineno - 1
        changed = lines[row][:opening] + entry.encode() + lines[row][opening:]
    else:
        row, last = old.lineno - 1, (old.end_lineno or old.lineno) - 1
        changed = lines[row][: old.col_offset] + shown.encode() + lines[last][old.end_col_offset :]
    return b"\n".join([*lines[:row], changed, *lines[last + 1 :]]).decode()


def meta_node(tree: ast.Module) -> ast.expr | None:
    """The expression assigned to META at module level, or None."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "META" for t in statement.targets
        ):
            return statement.value
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.target.id == "META"
        ):
            return statement.value
    return None


def _literal(node: ast.expr) -> dict[str, Any]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        values: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError("`**` in dict(...)")
            values[keyword.arg] = ast.literal_eval(keyword.value)
        return values
    value = ast.literal_eval(node)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("it is no dict with names as keys")
    return value
