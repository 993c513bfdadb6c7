from .sine import sine
