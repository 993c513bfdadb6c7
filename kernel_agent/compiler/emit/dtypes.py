"""Types as Triton's language names and promotes them, so that nothing is printed whose type Triton would change."""

from __future__ import annotations

from dataclasses import replace

from kernel_agent.compiler.emit.expression import Expression, Level, call, made
from kernel_agent.compiler.errors import CannotDerive

DTYPES = {
    "f64": "tl.float64", "f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16",
    "f8E5M2": "tl.float8e5", "f8E4M3FN": "tl.float8e4nv", "f8E4M3FNUZ": "tl.float8e4b8", "f8E5M2FNUZ": "tl.float8e5b16",
    "i1": "tl.int1", "i8": "tl.int8", "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64",
    "u8": "tl.uint8", "u16": "tl.uint16", "u32": "tl.uint32", "u64": "tl.uint64",
}  # fmt: skip
"""Element -> Triton's name; the IR has no unsigned elements, the language has."""

_NATURAL = {"int": "i32", "float": "f32", "bool": "i1"}


def dtype(element: str) -> str:
    """Triton's name. Raises `CannotDerive`."""
    if element not in DTYPES:
        raise CannotDerive(f"values of type {element} have no name in Triton's language")
    return DTYPES[element]


def natural(element: str) -> str:
    """The type that a Python number gets where nothing else gives it one; any other type stays."""
    return _NATURAL.get(element, element)


def bits(element: str) -> int:
    """Width of an integer type."""
    return int(element[1:])


def is_float(element: str) -> bool:
    """Whether a type, or a Python number, is of the floating kind."""
    return element == "float" or (element not in _NATURAL and element[0] in "fb")


def promoted(a: Expression, b: Expression, *, division: bool = False) -> str:
    """The type of an arithmetic operation, as `computation_type_impl` of Triton 3.6 to 3.9 finds it."""
    if a.weak and b.weak:
        return max(a.element, b.element, key=["bool", "int", "float"].index)
    for weak, other in ((a, b), (b, a)):
        if weak.weak and _kind(weak.element) <= _kind(other.element):
            return "f32" if division and other.element in ("f16", "bf16") else other.element
    return promoted_types(natural(a.element), natural(b.element), division=division)


def promoted_types(a: str, b: str, *, division: bool = False) -> str:
    """The common type of two tensors."""
    pair = {a, b}
    for wide in ("f64", "f32"):
        if wide in pair:
            return wide
    if "f16" in pair:
        return "f32" if division else "f16"
    if "bf16" in pair:
        return "f32" if division or len(pair) > 1 else "bf16"
    if is_float(a) or is_float(b):
        return a if a == b else "f16"
    if bits(a) != bits(b):
        return max(a, b, key=bits)
    return a if a[0] == "u" else b


def _kind(element: str) -> int:
    if element in ("bool", "i1"):
        return 0
    return 2 if is_float(element) else 1


def cast(value: Expression, element: str, **options: str) -> Expression:
    """A conversion: a method of what surely is a tensor, a function of what may be a Python number."""
    if value.static or value.weak:
        return call("tl.cast", [value, dtype(element)], element, **options)
    extra = "".join(f", {key}={option}" for key, option in options.items())
    return made(f"{value.within(Level.PRIMARY)}.to({dtype(element)}{extra})", Level.PRIMARY, element, (value,))


def of_type(value: Expression, element: str) -> Expression:
    """The value as Triton would have it of type `element`: converted where it is of another one."""
    if value.weak:
        return value if natural(value.element) == element else cast(value, element)
    return value if value.element == element else cast(value, element)


def unsigned(value: Expression, element: str) -> Expression:
    """The same bits without a sign. `element`: of the signed integer."""
    if value.weak and not value.text.startswith("-"):
        return value
    return cast(value, f"u{bits(element)}")


def signed(value: Expression) -> Expression:
    """The same bits with a sign."""
    return cast(value, f"i{bits(value.element)}") if value.element[0] == "u" else value


def as_tensor(value: Expression) -> Expression:
    """What `tl.maximum` and the like take an operand for: bfloat16 is widened."""
    element = natural(value.element)
    return replace(value, element="f32" if element == "bf16" else element)
