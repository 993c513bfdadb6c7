from .functions.scale import RowScale
from .functions import Shift as _Shift

row_scale = RowScale.apply
shift = _Shift.apply
