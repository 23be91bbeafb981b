"""Voting, a protocol of its own: clients never send a model, they vote on the labels of public samples.

    reserve a pool → local teachers → votes + sum + noise → account → labels → student → report
     setup.py         ae_dpfl.py       release.py           ledger.py           student.py  protocol.py
                      knn_dpfl.py

AE-DPFL and kNN-DPFL (Zhu et al. 2020). Both need what the other methods do not have: a public pool of samples without
labels, from the same kind of people. `protocol.py` runs the stages in this order; what is left of the arrow "account"
never leaves the trusted boundary, and what is right of it is post-processing.
"""

from fedblur.voting.base import Electorate, Voting

__all__ = ["Electorate", "Voting"]
