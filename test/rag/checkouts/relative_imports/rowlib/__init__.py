from .public import row_scale, shift
