"""The audits whose results are in audits/: all below the accountant's epsilon, and those without noise found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = sorted((Path(__file__).resolve().parents[3] / "audits").rglob("*.json"))


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_audit_result__is_below_the_claim_and_above_it_without_noise(path: Path) -> None:
    result = read(path)
    assert result["verdict"] == ("ABOVE" if result["noise_removed"] else "below")
    tops = [attack["interval_95"][1] for attack in result["attacks"].values()]
    assert result["noise_removed"] or max(tops) < result["claimed_epsilon"]


def test_audit_results__cover_three_methods_at_three_epsilons() -> None:
    real = [read(path) for path in RESULTS if not read(path)["noise_removed"]]
    settings = {(result["name"].split(" | ")[0], round(result["claimed_epsilon"])) for result in real}
    assert len(settings) == 9
    assert len(real) == 36
    assert {path.parent.name for path in RESULTS} == {"digits", "emnist"}
