"""The record of what a run claims is the same in Python and in summary.json, in files of version 0.2 too."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from fedblur.core.config import canonical
from fedblur.core.errors import RunError
from fedblur.privacy.claim import NOISELESS, SEEDED, UNBOUNDED, Claim, from_json, to_json, why_not_private
from fedblur.training.run_folder import RunFolder, RunSummary
from tests.worlds import record_of_a_run

OLD = Path(__file__).resolve().parents[1] / "fixtures/version_0_2"
RECORD = record_of_a_run()


@pytest.mark.parametrize("path", sorted(OLD.rglob("summary.json")), ids=lambda path: path.parent.name)
def test_summary__of_version_0_2_is_read_and_written_back_unchanged(path: Path) -> None:
    record = RunFolder(path.parent).read_summary()
    assert record is not None
    assert json.loads(canonical(to_json(record))) == json.loads(path.read_text(encoding="utf-8"))


def test_claim__comes_back_from_json_also_where_nothing_is_bounded() -> None:
    claim = replace(RECORD.privacy, epsilon=math.inf, clip_norm=math.inf, cautions=("a", "b"))
    assert from_json(Claim, json.loads(canonical(to_json(claim))), "here") == claim


def test_claim__cannot_be_changed_after_it_is_made() -> None:
    with pytest.raises(FrozenInstanceError):
        RECORD.privacy.epsilon = 1.0  # type: ignore[misc]


def test_claim__keys_of_other_versions_are_ignored_and_a_missing_one_is_named() -> None:
    table = to_json(RECORD)
    assert from_json(RunSummary, table | {"from": "the future"}, "summary.json") == RECORD
    del table["privacy"]["epsilon"]
    with pytest.raises(RunError, match=r"summary\.json is not what fedblur writes: privacy\.epsilon: field required"):
        from_json(RunSummary, table, "summary.json")


def test_claim__says_why_a_run_protects_nobody() -> None:
    assert why_not_private(private_noise=True, noise_multiplier=1.0, clip_norm=0.1) is None
    assert why_not_private(private_noise=False, noise_multiplier=1.0, clip_norm=0.1) == SEEDED
    assert why_not_private(private_noise=True, noise_multiplier=0.0, clip_norm=0.1) == NOISELESS
    assert why_not_private(private_noise=True, noise_multiplier=0.0, clip_norm=math.inf) == UNBOUNDED
