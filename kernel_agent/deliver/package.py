"""Write the delivered files of a green candidate into the output folder."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from kernel_agent.certificate.issue import NotGreen, issue
from kernel_agent.certificate.record import Provenance
from kernel_agent.deliver.fingerprint import forward_fingerprint
from kernel_agent.gate.mutants.records import MutationTally
from kernel_agent.gate.verdict import Verdict
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.syntax import accepts
from kernel_agent.wholefile import write_whole

OPERATOR_IMPORTS = ("import inspect", "import os", "import subprocess", "import sys")
DISPATCH_IMPORT = "from torch.utils._python_dispatch import TorchDispatchMode"


@dataclass(frozen=True)
class Delivery:
    """The files of one delivery, all in one folder."""

    operator: Path
    """`<stem>_backward.py`: the finished pair, an autograd.Function and a callable."""
    test: Path
    """`test_<stem>.py`."""
    bench: Path
    """`bench_<stem>.py`."""
    certificate: Path
    """`certificate.json`."""

    def files(self) -> tuple[Path, ...]:
        """All delivered files."""
        return (self.operator, self.test, self.bench, self.certificate)


def deliver(
    spec: KernelSpec,
    candidate: Candidate,
    verdict: Verdict,
    provenance: Provenance,
    folder: Path,
    mutants: MutationTally | None = None,
) -> Delivery:
    """Write operator, test, benchmark and certificate for a green candidate; `mutants` is what the gate did to others.

    Raises `NotGreen` for any other verdict. Files of an earlier delivery in the same folder are replaced as a whole:
    each is written beside its target and renamed.
    """
    if not verdict.green:
        raise NotGreen(
            f"a {verdict.status.value} candidate cannot be delivered",
            remedy="repair it until kernel-agent check is green",
        )
    folder.mkdir(parents=True, exist_ok=True)
    stem = spec.facts.stem
    files = Delivery(
        folder / f"{stem}_backward.py",
        folder / f"test_{stem}.py",
        folder / f"bench_{stem}.py",
        folder / "certificate.json",
    )
    operator = render_operator(spec, candidate)
    context = {
        "delivered": files.operator.name,
        "bench": files.bench.name,
        "stub": spec.facts.stub,
        "reference": "reference" if spec.facts.has_reference else "",
    }
    certificate = issue(
        spec,
        assemble(spec, candidate),
        verdict,
        file=files.operator.name,
        delivered=operator.encode(),
        mutants=mutants,
        provenance=provenance,
        name=files.certificate.name,
    )
    write_whole(files.operator, operator)
    write_whole(files.test, _template("test.py.j2", **context))
    write_whole(files.bench, _template("bench.py.j2", **context))
    write_whole(files.certificate, certificate.model_dump_json(indent=2) + "\n")
    return files


def render_operator(spec: KernelSpec, candidate: Candidate) -> str:
    """The finished pair with its operator section."""
    pair = assemble(spec, candidate)
    reference = "reference" if spec.facts.has_reference and not spec.custom_gradient else ""
    tf32 = "tl.dot(" in spec.facts.source and "ieee" not in spec.facts.source
    section = _template(
        "operator.py.j2",
        stub=spec.facts.stub,
        class_name="".join(part.capitalize() for part in spec.facts.stub.split("_")) + "Function",
        parameters=tuple(spec.facts.parameters),
        nondiff_outputs=tuple(i for i, out in enumerate(spec.outputs) if not out.needs_grad),
        mutated=spec.mutated,
        grads=spec.grads,
        fingerprint=forward_fingerprint(spec.facts.source),
        reference=reference,
        tf32=tf32,
        takes_needs=_takes_needs(candidate.backward),
        forward_call=_forward_call(pair),
        argument_call=_argument_call(pair, {name for entry in spec.sweep for name in entry.dims}),
    )
    imports = (*OPERATOR_IMPORTS, *([DISPATCH_IMPORT] if reference and tf32 else []))
    return _with_imports(pair, imports).rstrip() + "\n\n\n" + section


def _forward_call(pair: str) -> str:
    """The call of `forward` with the values of all parameters in a row: some of them it takes by keyword alone."""
    function = next(n for n in ast.parse(pair).body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    keyword = [argument.arg for argument in function.args.kwonlyargs]
    if not keyword:
        return "forward(*arguments)"
    first = [f"{name}=arguments[{place - len(keyword)}]" for place, name in enumerate(keyword)]
    return f"forward(*arguments[:{-len(keyword)}], {', '.join(first)})"


def _takes_needs(backward: str) -> bool:
    functions = [
        node for node in ast.parse(backward).body if isinstance(node, ast.FunctionDef) and node.name == "backward"
    ]
    return accepts(functions[-1], "needs")


def _argument_call(pair: str, dims: set[str]) -> str:
    """The arguments of the `make_args` call, by the rule of `pairs.arguments.build_arguments`."""
    function = next(n for n in ast.parse(pair).body if isinstance(n, ast.FunctionDef) and n.name == "make_args")
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [
        a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    names = {*positional, *(argument.arg for argument in arguments.kwonlyargs)}
    unnamed = [name for name in required if name not in dims and name not in ("device", "dtype", "seed")]
    extra = [text for name, text in (("device", "device=device"), ("seed", "seed=0")) if name in names]
    if "dtype" in required and "dtype" not in dims:
        extra.append("dtype=torch.float32")
    if len(unnamed) == 1:
        if "dtype" in names and "dtype" in dims:
            extra.append('dtype=entry["dtype"]')
        return ", ".join([f"{unnamed[0]}=dict(entry)", *extra])
    passed = "entry" if dims <= names or arguments.kwarg else "{k: v for k, v in entry.items() if k != 'dtype'}"
    return ", ".join([f"**{passed}", *extra])


def _with_imports(source: str, imports: Iterable[str]) -> str:
    """Add standard-library imports above the first import that is not of the future, leaving out what is there."""
    imported = (node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom)))
    first = next(node.lineno for node in imported if getattr(node, "module", "") != "__future__")
    lines = source.splitlines()
    missing = [text for text in imports if text not in lines]
    return "\n".join([*lines[: first - 1], *missing, *([""] if missing else []), *lines[first - 1 :]]) + "\n"


def _template(name: str, **context: object) -> str:
    environment = Environment(
        loader=PackageLoader("kernel_agent.deliver"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(name).render(**context)
