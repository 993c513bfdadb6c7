from .scale import scale_rows
from .scale import adjoint as scale_rows_adjoint
from . import shift, sizes
