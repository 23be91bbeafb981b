"""Stage 2, methods. Parts that shape local training, one file each; they compose, and DP-FedAvg is the empty list.

A method cannot hurt privacy: whatever it does, the clip comes after it (invariant 1).
"""

from fedblur.learning.methods.base import Gradient, Method, global_norm

__all__ = ["Gradient", "Method", "global_norm"]
