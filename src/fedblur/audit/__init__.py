"""Empirical privacy: lower bounds on epsilon from attacks on the real round. They find bugs; they prove no privacy."""

from fedblur.audit.one_shot import Attack, Audit, audit
from fedblur.audit.worst_case import Finding, WorstCase, check_worst_case

__all__ = ["Attack", "Audit", "Finding", "WorstCase", "audit", "check_worst_case"]
