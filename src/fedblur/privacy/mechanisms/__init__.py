"""Stage 5, mechanism. In: Bounded updates. Out: a noisy sum, the only thing about clients that leaves a round."""

from fedblur.privacy.mechanisms.base import Mechanism

__all__ = ["Mechanism"]
