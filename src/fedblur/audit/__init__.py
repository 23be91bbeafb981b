"""Empirical privacy: lower bounds on epsilon from attacks on the real round. They find bugs; they prove no privacy."""

from fedblur.audit.one_shot import Attack, Audit, audit

