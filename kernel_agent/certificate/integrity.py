"""What in a certificate does not agree with the rest of it, or with the file beside it.

All of it can be forged by who can write the file. These findings say what was changed where somebody was careless; what
is true of the backward, a replay says.
"""

from __future__ import annotations

from pathlib import Path

from kernel_agent.certificate.issue import gradient_records, hashes_of, input_records, tier_records
from kernel_agent.certificate.record import Certificate, digest
from kernel_agent.errors import InputError
from kernel_agent.gate.verdict import Status
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import KernelSpec

_SECTIONS = ("forward", "backward")


def disagreements(certificate: Certificate, folder: Path | None = None) -> tuple[str, ...]:
    """Sentences on what of a certificate does not agree with itself, or with the finished file in `folder`.

    Raises `InputError` where the pair inside has no sections.
    """
    return (*_hashes(certificate), *_verdict(certificate), *_beside(certificate, folder))


def unlike_sources(certificate: Certificate, spec: KernelSpec) -> tuple[str, ...]:
    """What the certificate says of its sources and they do not say, now that they were run."""
    claims = {
        "the function": (certificate.stub, spec.facts.stub),
        "the gradients": (", ".join(certificate.grads), ", ".join(spec.grads)),
        "the shapes": (
            "; ".join(entry.label for entry in certificate.sweep),
            "; ".join(entry.label for entry in spec.sweep),
        ),
        "the inputs": (_said(certificate.inputs), _said(input_records(spec))),
    }
    return tuple(
        f"{what}: it says {claimed}, its sources say {found}"
        for what, (claimed, found) in claims.items()
        if claimed != found
    )


def _said(inputs: tuple[object, ...]) -> str:
    return "; ".join(str(one) for one in inputs)


def _hashes(certificate: Certificate) -> list[str]:
    """Texts inside that are not those of the hashes beside them."""
    claimed = certificate.hashes
    found = hashes_of(certificate.sources, b"")
    texts = {
        "forward": "the forward section of the pair",
        "backward": "the backward section of the pair",
        "truth": "the file that the exact gradients are of",
    }
    pairs = {name: (getattr(found, name), getattr(claimed, name)) for name in texts}
    return [
        f"hash of `{name}`: {texts[name]} is another one ({here[:12]} instead of {there[:12]})"
        for name, (here, there) in pairs.items()
        if here != there
    ]


def _verdict(certificate: Certificate) -> list[str]:
    """A verdict that does not follow from its cases."""
    verdict, said = certificate.verdict, []
    red = [case.case for case in verdict.cases if case.status is not Status.GREEN]
    beyond = [case.case for case in verdict.cases for score in case.grads if not score.ratio <= 1.0 or not score.passed]
    if not verdict.green:
        said.append(f"it certifies nothing: its verdict is {verdict.status.value} over {len(verdict.cases)} cases")
    elif red or beyond:
        said.append(f"its verdict is {verdict.status.value}, and not all of its cases are: {(red or beyond)[0]}")
    if certificate.gradients != gradient_records(verdict):
        said.append("the rows per gradient are not those of its cases")
    if certificate.tiers != tier_records(verdict):
        said.append("the rows per tier are not those of its cases")
    return said


def _beside(certificate: Certificate, folder: Path | None) -> list[str]:
    """The finished file, where it still lies beside the certificate."""
    path = None if folder is None else folder / certificate.delivered
    if path is None or not path.is_file():
        return []
    try:
        content = path.read_bytes()
        there, inside = split_sections(content.decode()), split_sections(certificate.sources.pair)
    except (OSError, UnicodeDecodeError, InputError) as error:
        return [f"{path.name} beside it cannot be read as a pair file: {error}"]
    changed = [name for name in _SECTIONS if getattr(there, name).strip() != getattr(inside, name).strip()]
    if changed:
        return [f"{path.name} beside it has another {' and another '.join(changed)} section"]
    if digest(content) != certificate.hashes.delivered:
        return [f"hash of `delivered`: {path.name} beside it was changed, its forward and backward sections were not"]
    return []
