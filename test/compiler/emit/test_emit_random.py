"""Random kernels: nested loops, branches and carries that are read late, read twice and passed on, printed and run.

Names and variables are where a printer goes wrong silently. A random program reads old values in all the places that
nobody would think of.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from emit_kernels import kernel
from emit_round_trip import formatted, run, seeded

from kernel_agent.compiler.emit import triton_source
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

N = 4
NAMES = ["", "", "a", "b", "x", "sum", "n", "d_x"]
"""User's names, some of which are taken, reserved or a parameter's."""


class Maker:
    """Builds a kernel from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kernel, self.b, (self.x, self.out, self.n, self.f) = kernel(
            "randomly", "*f32 X, *f32 Out, i32 n, f32 f", {"BLOCK": N}
        )
        self.stores = 0
        self.cols = self.b.arange(0, N, "BLOCK")

    def make(self) -> Kernel:
        tiles = [self.load(self.b.const(0)), self.load(self.n)]
        counts = [self.n, self.b.program_id(0, "pid")]
        self.some(tiles, counts, depth=0)
        for tile in tiles[-3:]:
            self.store(tile)
        return self.kernel

    def load(self, row: Value) -> Value:
        row = self.b.elementwise(Code.REM, (row, self.b.const(4)))
        row = self.b.elementwise(Code.MAX, (row, self.b.const(0)))
        return self.b.load(self.x, self.b.add(self.b.mul(row, self.b.const(N, "i32", "BLOCK")), self.cols))

    def store(self, tile: Value) -> None:
        program = self.b.mul(self.b.program_id(0), self.b.const(100))
        row = self.b.mul(self.b.add(program, self.b.const(self.stores)), self.b.const(N))
        self.stores += 1
        self.b.store(self.out, self.b.add(row, self.cols), tile)

    def some(self, tiles: list[Value], counts: list[Value], depth: int) -> None:
        """Append values to the two lists."""
        for _ in range(self.random.randint(2, 6 - depth)):
            choice = self.random.random()
            if choice < 0.12 and depth < 2:
                self.loop(tiles, counts, depth)
            elif choice < 0.3 and depth < 3:
                self.branch(tiles, counts, depth)
            elif choice < 0.36:
                self.store(self.random.choice(tiles))
            elif choice < 0.44:
                counts.append(self.number(counts))
            else:
                tiles.append(self.tile(tiles, counts))

    def number(self, counts: list[Value]) -> Value:
        a, c = self.random.choice(counts), self.random.choice(counts)
        value = self.random.choice([
            lambda: self.b.add(a, self.b.const(self.random.randint(-2, 3))),
            lambda: self.b.sub(a, c),
            lambda: self.b.elementwise(Code.MIN, (self.b.mul(a, c), self.b.const(5))),
            lambda: self.b.elementwise(Code.FLOORDIV, (a, self.b.const(2))),
        ])()  # fmt: skip
        return self.named(value)

    def tile(self, tiles: list[Value], counts: list[Value]) -> Value:
        a, c = self.random.choice(tiles), self.random.choice(tiles[-3:])
        count = self.random.choice(counts)
        value = self.random.choice([
            lambda: self.b.add(a, c),
            lambda: self.b.sub(a, self.b.sub(c, self.f)),
            lambda: self.b.mul(self.b.unary(Code.SIGMOID, a), self.b.number(0.5, a)),
            lambda: self.b.neg(self.b.unary(Code.TANH, c)),
            lambda: self.b.sub(a, self.b.div(self.b.sum(c, 0), self.b.const(4.0, "f32"))),
            lambda: self.b.select(self.b.compare("lt", a, c), a, self.b.cast(count, "f32")),
            lambda: self.load(count),
            lambda: self.b.unary(Code.SIN, self.b.mul(a, self.b.cast(count, "f32"))),
        ])()  # fmt: skip
        return self.named(value)

    def named(self, value: Value) -> Value:
        if value.producer is not None and not value.name:
            value.name = self.random.choice(NAMES)
        return value

    def loop(self, tiles: list[Value], counts: list[Value], depth: int) -> None:
        bounds = (self.b.const(self.random.choice([0, 0, 1])), self.random.choice(counts), self.b.const(1))
        bounds = (bounds[0], self.b.elementwise(Code.MIN, (bounds[1], self.b.const(3))), bounds[2])
        carries = [self.random.choice(tiles) for _ in range(self.random.randint(1, 3))]
        carries = [self.b.whole(tile, (N,)) for tile in carries]
        counters = [self.random.choice(counts)] if self.random.random() < 0.5 else []

        def body(index: Value, inner: list[Value]) -> list[Value]:
            inside, numbers = [*tiles, *inner[: len(carries)]], [*counts, index, *inner[len(carries) :]]
            self.some(inside, numbers, depth + 1)
            found = [self.random.choice(inside[-4:]) for _ in carries]
            return [*found, *(self.b.add(self.random.choice(numbers[-3:]), self.b.const(1)) for _ in counters)]

        results = self.b.loop(
            bounds, [*carries, *counters], body, index_name="i",
            names=[self.random.choice(NAMES) for _ in carries], reverse=self.random.random() < 0.3,
        )  # fmt: skip
        tiles += results[: len(carries)]
        counts += results[len(carries) :]

    def branch(self, tiles: list[Value], counts: list[Value], depth: int) -> None:
        a, c = self.random.choice(counts), self.random.choice(counts)
        count = self.random.randint(1, 2)

        def side() -> list[Value]:
            inside, numbers = list(tiles), list(counts)
            if self.random.random() < 0.7:
                self.some(inside, numbers, depth + 1)
            return [self.b.whole(self.random.choice(inside[-4:]), (N,)) for _ in range(count)]

        tiles += self.b.branch(self.b.compare(self.random.choice(["lt", "eq", "ge"]), a, c), side, side)


@pytest.mark.parametrize("seed", range(24))
def test_a_random_kernel_does_what_it_did(tmp_path: Path, seed: int) -> None:
    made = Maker(seed).make()
    given = {"X": seeded(4, N), "Out": torch.zeros(2, 100, N, dtype=torch.float64), "n": 1 + seed % 3, "f": 0.25}
    wanted = dict(given, X=given["X"].double(), Out=given["Out"].clone())  # type: ignore[attr-defined]
    evaluate(made, (2,), wanted)
    text = triton_source(made).module_text
    found = run(made, tmp_path, (2,), dict(given, Out=torch.zeros(2, 100, N)))["Out"]
    torch.testing.assert_close(found, wanted["Out"], rtol=1e-6, atol=1e-6, msg=text)


def test_random_kernels_are_formatted_as_ruff_would(tmp_path: Path) -> None:
    text = "\n\n".join(triton_source(Maker(seed).make()).text for seed in range(24))
    assert formatted(text, tmp_path) == text
