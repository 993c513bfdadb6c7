"""Instructions are counted where they run: outside of loops once, inside as often as the loop turns."""

from kernel_agent.bench.ptx_code import code_parts

NESTED = """
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
	.reg .b32 	%r<9>;
	ld.param.u64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	add.s32 	%r2, %r1, 1;
$L__BB0_1:
	ld.global.v4.b32 	{ %r3, %r4, %r5, %r6 }, [ %rd1 + 0 ];
	shfl.sync.bfly.b32 	%r7, %r3, 16, 31, -1;
$L__BB0_2:
	fma.rn.f32 	%f1, %f2, %f3, %f4;
	div.full.f32 	%f5, %f1, %f2;
	setp.lt.s32 	%p1, %r2, 7;
	@%p1 bra 	$L__BB0_2;
	@%p2 bra 	$L__BB0_1;
	@%p3 st.global.b32 	[ %rd1 + 0 ], { %r7 };
	ret;
}
"""


def test_nested_loops_are_told_apart():
    outside, outer, inner = code_parts(NESTED)
    assert outside.instructions == 2, "add and st; moves of registers and parameters are free"
    assert outer.instructions == 2, "ld and shfl"
    assert inner.instructions == 1 + 8 + 1, "fma, a division of eight, setp"


def test_wide_loads_take_a_turn_for_each_of_their_words():
    outside, outer, inner = code_parts(NESTED)
    assert (outside.moves, outer.moves, inner.moves) == (1, 4 + 1, 0)


def test_a_branch_forward_is_no_loop():
    text = "\t@%p1 bra \t$L__BB0_2;\n\tadd.s32 \t%r1, %r2, 1;\n$L__BB0_2:\n\tret;\n"
    (outside,) = code_parts(text)
    assert outside.instructions == 1
