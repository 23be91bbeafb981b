"""Empirical privacy: lower bounds on epsilon from attacks on the real round. They find bugs; they prove no privacy."""

from fedblur.experiments.audit.isolation import check_isolation
from fedblur.experiments.audit.one_shot import Attack, Audit, audit
from fedblur.experiments.audit.worst_case import Finding, WorstCase, check_worst_case
from fedblur.privacy.laws import Check

__all__ = ["Attack", "Audit", "Check", "Finding", "WorstCase", "audit", "check_isolation", "check_worst_case"]
