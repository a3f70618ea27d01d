"""The documented name of `allranks.tensorflow.compat`."""

from allranks.tensorflow.compat import mend

__all__ = ["mend"]
