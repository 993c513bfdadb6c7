"""`in_order`: whether a gradient is a cotangent element by element, whatever order of memory each has.

A kernel that adds something to a tensor whose strides it is told, and stores sums in a row, has as gradient of the
tensor the cotangent itself, under the indices that the strides belong to. That each index is one of the tensor's is
asked of the launch: its strides and sizes are those that the kernel was told.
"""

from __future__ import annotations

from kernel_agent.compiler.plan import Fact
from kernel_agent.compiler.schedule.claims import open_claims
from kernel_agent.compiler.schedule.coverage import Counter
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.injective import scale
from kernel_agent.compiler.schedule.linear import Form, Kind, quotient_of
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial
from kernel_agent.compiler.schedule.sites import Site
from kernel_agent.compiler.ssa.value import Op


def in_order(forms: Forms, store: Site, load: Op, tensor: str, name: str) -> tuple[Fact, ...] | None:
    """Facts under which a store of what was loaded puts the element of every index of `tensor`'s gradient `name` to
    that index, if it loads a cotangent whose elements lie one behind the other; None where there are none.

    With them the store reaches every index once, whether or not several share an element of the tensor.
    """
    counter = Counter(forms)
    if counter.count(store) is None:
        return None
    target, source = forms.of(store.op.offset), forms.of(load.offset)
    if target.base.terms or source.base.terms:
        return None
    parts = [part for part, _ in counter.axes]
    source = _in_digits(source, parts)
    indices = {atom for part in parts for atom, _ in part.terms}
    if not indices == set(target.coefficients) == set(source.coefficients):
        return None
    axes: list[tuple[Polynomial, Polynomial]] = []
    rest = [(scale(source.coefficients, part), scale(target.coefficients, part), size) for part, size in counter.axes]
    count = ONE
    while rest:
        inner = next((one for one in rest if one[0] == count), None)
        if inner is None or inner[1] is None:
            return None
        rest.remove(inner)
        axes.insert(0, (inner[1], inner[2]))
        count = count * inner[2]
    claims = open_claims(counter.claims)
    if claims is None or not all(stride.printable and size.printable for stride, size in axes):
        return None
    sizes = ", ".join(size.text() for _, size in axes)
    texts = [f"{tensor}.shape == ({sizes},)", *(claim.text() for claim in claims)]
    texts += [f"{tensor}.stride({place}) == {stride.text()}" for place, (stride, _) in enumerate(axes)]
    if not forms.launch.calls.show(texts):
        return None
    reason = f"{name} has the cotangent's elements under the same indices"
    return tuple(Fact(text, reason) for text in texts)


def _in_digits(form: Form, parts: list[Form]) -> Form:
    """The form with digits of a number, where some parts are such, for the number."""
    digits = [atom for part in parts for atom, _ in part.terms if atom.kind is Kind.REMAINDER]
    for atom in sorted(digits, key=lambda atom: atom.key):
        assert atom.whole is not None
        assert atom.divisor is not None
        terms = form.coefficients
        ((index, unit),) = atom.whole.terms if len(atom.whole.terms) == 1 else ((None, ZERO),)
        if index in terms and unit == ONE and not atom.whole.base.terms:
            number = terms.pop(index)
            higher = quotient_of(atom.whole, atom.divisor)
            terms[higher] = terms.get(higher, ZERO) + number * atom.divisor
            terms[atom] = terms.get(atom, ZERO) + number
            form = Form.of(terms, form.base)
    return form
