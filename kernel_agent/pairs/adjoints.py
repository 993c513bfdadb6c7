"""What the adjoint of a torch function is made of: what a backward may compute with outside its kernels."""

from __future__ import annotations

from collections.abc import Collection

_SPELLINGS = {
    "truediv": "div",
    "rtruediv": "div",
    "rdiv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "rsub": "sub",
    "negative": "neg",
    "special_expit": "sigmoid",
    "log_sigmoid": "logsigmoid",
    "clip": "clamp",
    "clamp_min": "clamp",
    "clamp_max": "clamp",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "absolute": "abs",
}
"""Other names of one function, beside `f_`, `__f__`, `__rf__` and `__if__`."""
_OPERATORS = frozenset(["add", "sub", "mul", "truediv", "pow", "matmul", "and", "or", "xor"])

_PRODUCTS = (
    "matmul mm bmm mv dot addmm addmv addr baddbmm addbmm einsum linear bilinear outer ger inner vdot tensordot "
    "chain_matmul"
)
_COMPARED = "where gt ge lt le eq ne and logical_and logical_not mul"
_SCATTERS = "index_add index_copy index_put scatter scatter_add embedding"
_CONVOLUTIONS = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution convolution_backward"
)

_ADJOINTS = {
    # closed under adjoints: of a product a product, of a sum a sum or a sign, of a gather a scatter
    **dict.fromkeys(_PRODUCTS.split(), _PRODUCTS),
    **dict.fromkeys(["add", "sub", "neg"], "add sub neg"),
    "mul": "mul div",
    "div": "mul div neg square pow reciprocal",
    **dict.fromkeys(["cumsum", "flip"], "cumsum flip"),
    **dict.fromkeys(_SCATTERS.split(), _SCATTERS),
    **dict.fromkeys(_CONVOLUTIONS.split(), _CONVOLUTIONS),
    **dict.fromkeys(["gather", "take_along_dim"], "scatter_add"),
    "index_select": "index_add",
    # smooth functions of one number: their derivative by the value or the input, times the cotangent
    "exp": "mul",
    "exp2": "mul",
    "expm1": "mul add exp",
    "log": "mul div reciprocal",
    "log2": "mul div reciprocal",
    "log10": "mul div reciprocal",
    "log1p": "mul div reciprocal add",
    "sqrt": "mul div reciprocal rsqrt",
    "rsqrt": "mul div neg pow square",
    "reciprocal": "mul div neg pow square",
    "square": "mul",
    "pow": "mul div sub add pow square log where",
    "sigmoid": "mul sub add neg sigmoid_backward",
    "tanh": "mul sub add neg pow square tanh_backward",
    "sin": "mul cos",
    "cos": "mul neg sin",
    "erf": "mul neg square pow exp",
    "silu": "mul sub add neg sigmoid silu_backward",
    "gelu": "mul div sub add neg square pow erf tanh exp gelu_backward",
    "softplus": "mul div sub add neg exp sigmoid where gt softplus_backward",
    "logsigmoid": "mul sub add neg sigmoid log_sigmoid_backward",
    # functions with a kink: where each branch was taken
    "where": "where mul",
    "abs": f"{_COMPARED} sign sgn neg",
    "clamp": _COMPARED,
    "maximum": f"{_COMPARED} div",
    "minimum": f"{_COMPARED} div",
    **dict.fromkeys(["amax", "amin", "max", "min"], "eq where div scatter"),
    "relu": f"{_COMPARED} threshold_backward",
    "leaky_relu": f"{_COMPARED} leaky_relu_backward",
    "elu": f"{_COMPARED} add exp elu_backward",
    # functions of a whole row
    "mean": "div mul",
    "softmax": "mul sub neg _softmax_backward_data",
    "log_softmax": "mul sub neg exp softmax _log_softmax_backward_data",
    "logsumexp": "mul sub exp softmax",
    "prod": "mul div",
    "var": "mul div sub",
    "std": "mul div sub",
    "norm": "mul div",
    "layer_norm": "mul div sub add neg rsqrt sqrt pow square native_layer_norm_backward",
    "rms_norm": "mul div sub add neg rsqrt sqrt pow square",
    "group_norm": "mul div sub add neg rsqrt sqrt pow square native_group_norm_backward",
    "sort": "scatter scatter_add",
    "topk": "scatter scatter_add",
    **dict.fromkeys(["cummax", "cummin"], "scatter_add"),
    "lerp": "mul sub add neg",
    "addcmul": "mul",
    "addcdiv": "mul div neg square pow reciprocal",
    "dropout": "mul div",
    "scaled_dot_product_attention": f"{_PRODUCTS} mul sub neg exp softmax",
}
"""What the adjoint of each function is made of, in the plain names of `plain_name`, and no more than that."""


def declarable(stub_ops: Collection[str]) -> frozenset[str]:
    """Plain names of what META["torch_ops"] may declare for a stub that calls `stub_ops`: these and their adjoints."""
    own = {plain_name(op) for op in stub_ops}
    return frozenset(own.union(*(_ADJOINTS.get(op, "").split() for op in own)))


def plain_name(name: str) -> str:
    """`mul` for `mul_`, `__mul__`, `__rmul__`, `__imul__` and `multiply`: one function in all its spellings."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[1:] in _OPERATORS and name[0] in "ri":
            name = name[1:]
    elif name.endswith("_"):
        name = name[:-1]
    return _SPELLINGS.get(name, name)
