"""`read_certificate`: a file that claims to be a certificate, read as data. Nothing in it is executed here."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from kernel_agent.certificate.record import FORMAT, Certificate
from kernel_agent.errors import InputError

LARGEST = 64 << 20
"""Bytes of a file that is still read: real ones have some hundred thousand."""
_REMEDY = "Certificates lie beside every delivered file; kernel-agent check PAIR.py --certificate FILE.json writes one."


def read_certificate(path: Path) -> Certificate:
    """The certificate in a file.

    Raises `InputError` for what is none, and for one of another format, with what to do about it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise InputError("there is no such file", path=path, remedy=_REMEDY) from None
    except OSError as error:
        raise InputError(f"the file cannot be read: {error.strerror}", path=path, remedy=_REMEDY) from None
    if len(data) > LARGEST:
        raise InputError(f"this is no certificate: it has more than {LARGEST >> 20} MiB", path=path, remedy=_REMEDY)
    _refuse_other_formats(data, path)
    try:
        return Certificate.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"this is no whole certificate: `{place}`: {first['msg']}",
            path=path,
            remedy="It was changed or cut short. " + _REMEDY,
        ) from None


def _refuse_other_formats(data: bytes, path: Path) -> None:
    """Say of a certificate that this version cannot read which version can."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise InputError("this is no certificate: it is no JSON", path=path, remedy=_REMEDY) from None
    if not isinstance(found, dict) or "verdict" not in found:
        raise InputError("this is no certificate: it holds no verdict", path=path, remedy=_REMEDY)
    number = found.get("format", 1)
    if type(number) is not int or number > FORMAT:
        raise InputError(
            f"this certificate is of format {number if type(number) is int else '?'}, this version reads {FORMAT}",
            path=path,
            remedy="Recheck it with the version of kernel-agent that wrote it, or a later one.",
        )
    if number < FORMAT:
        raise InputError(
            f"this certificate is of format {number}, which carries no sources to judge again",
            path=path,
            remedy="Prove the delivered file anew: kernel-agent check DELIVERED.py --certificate certificate.json",
        )
