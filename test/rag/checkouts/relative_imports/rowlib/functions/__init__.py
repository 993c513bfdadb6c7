from .scale import RowScale
from .shift import Shift
from .product import Product, Outer
