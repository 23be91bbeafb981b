"""Verdicts follow their rules, and a tuned table follows its tuning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedblur.core.errors import ConfigError
from fedblur.experiments.table_spec import Cell
from papers.rendering.claims import combine, verdicts
from papers.rendering.document import Document, read_document
from papers.rendering.gains import chance, printed_gains
from papers.rendering.tables import printed_value
from papers.rendering.tuning import tuning_state
from tests.papers.invented import CHENG, copy_of, invent


def _document(tmp_path: Path, accuracy: Callable[[Cell], float | None]) -> Document:
    folder = copy_of(CHENG, tmp_path / "papers")
    invent(folder, accuracy)
    return read_document(folder)


def _verdict(document: Document, name: str) -> str:
    return next(item.words for item in verdicts(document) if item.name == name)


def test_combine__alike_or_mixed_and_the_unmeasured_have_no_say() -> None:
    assert combine(["holds", "holds", "not yet measured"]) == "holds"
    assert combine(["holds", "does not hold"]) == "mixed"
    assert combine(["not yet measured"]) == "not yet measured"
    assert combine([]) == "not yet measured"


def test_printed__gains_are_those_of_the_brief() -> None:
    document = read_document(CHENG)

    def of(source: str, method: str = "BLUR + LUS") -> list[float]:
        return [round(gain, 2) for gain in printed_gains(document, source, method, "DP-FedAvg")]

    assert (min(of("Table 1, CNN-2-Layers")), max(of("Table 1, CNN-2-Layers"))) == (2.73, 4.83)
    assert (min(of("Table 1, ResNet-18")), max(of("Table 1, ResNet-18"))) == (4.06, 5.06)
    assert min(of("Table 3, ResNet-18", "LUS")) == 0.28
    assert of("Table 2, CNN-2-Layers")[0] == 5.11


def test_printed__stands_in_every_table_as_the_tables_expect() -> None:
    document = read_document(CHENG)
    for name in document.sources:
        for row in document.groups(name):
            printed = printed_value(document, name, row)
            assert document.spec(name).expected.get(row.cells[0].group) == (None if printed is None else printed[0])


def test_gain__is_paired_by_seed_and_setting(tmp_path: Path) -> None:
    def accuracy(cell: Cell) -> float | None:
        if cell.table != "table1" or cell.config.epsilon != 2 or cell.label not in ("DP-FedAvg", "BLUR + LUS"):
            return None
        if cell.label == "BLUR + LUS":
            return None if cell.config.seed == 2 else 0.6 + 0.1 * cell.config.seed
        return 0.5 + 0.1 * cell.config.seed  # seed 2 has no partner: its 0.7 must not count

    found = next(v for v in verdicts(_document(tmp_path, accuracy)) if v.name == "C1").findings[0]
    assert "+10.00 at ε = 2" in found.evidence
    assert found.verdict == "holds"


def test_verdict__says_when_it_is_within_chance_and_when_in_part(tmp_path: Path) -> None:
    def accuracy(cell: Cell) -> float | None:
        if cell.table != "table1" or cell.config.seed != 0:
            return None
        return 0.53 if cell.label == "BLUR + LUS" else 0.5

    document = _document(tmp_path, accuracy)
    assert chance(document, "table1", 1) > 3  # by the paper's own ±: one seed decides little
    assert _verdict(document, "C1") == "holds (not significant, partly measured)"


def test_verdict__other_settings_are_shown_and_do_not_decide(tmp_path: Path) -> None:
    def accuracy(cell: Cell) -> float | None:
        return {"table1-tuned": 0.9 if cell.label == "BLUR + LUS" else 0.5}.get(cell.table)

    document = _document(tmp_path, accuracy)
    assert _verdict(document, "C1") == "not yet measured"
    found = next(item for item in verdicts(document) if item.name == "C1").findings
    assert [finding.verdict for finding in found if not finding.counts].count("holds") == 1


def test_larger__compares_cells_that_differ_in_the_model_alone(tmp_path: Path) -> None:
    def accuracy(cell: Cell) -> float | None:
        large = cell.table == "table2-resnet18"
        return 0.5 + (0.1 + 0.1 * large) * (cell.label == "BLUR + LUS") if large or cell.table == "table2" else None

    folder = copy_of(CHENG, tmp_path / "papers")
    invent(folder, accuracy)
    assert _verdict(read_document(folder), "C3") == "holds (partly measured)"
    shorter = folder / "table2-resnet18.toml"
    shorter.write_text(shorter.read_text().replace("rounds = 300", "rounds = 100"))
    invent(folder, accuracy)
    assert _verdict(read_document(folder), "C3") == "not yet measured"


def test_steadier__says_of_a_steady_line_that_it_is_the_lower_one(tmp_path: Path) -> None:
    def accuracy(cell: Cell) -> float | None:
        falling = 0.5 - 0.001 * cell.config.local.steps
        return {"DP-FedAvg": falling, "BLUR + LUS": 0.4}.get(cell.label) if cell.table == "fig-steps" else None

    found = next(v for v in verdicts(_document(tmp_path, accuracy)) if v.name == "C9").findings[0]
    assert found.verdict == "holds"
    assert "falls by 0.00 points, DP-FedAvg by 5.50" in found.evidence
    assert found.evidence.endswith("BLUR + LUS is the more accurate at 0 of 6 values")


def test_rule__an_unknown_one_is_refused(tmp_path: Path) -> None:
    folder = copy_of(CHENG, tmp_path / "papers")
    claims = folder / "page" / "claims.toml"
    claims.write_text(claims.read_text().replace('rule = "gain"', 'rule = "gian"', 1))
    with pytest.raises(ConfigError, match="gian"):
        verdicts(read_document(folder))


# --- tuning ---


def _tuning(cell: Cell) -> float | None:
    """What table1-tuned.toml has is best: momentum at S = 0.03, with a longer server step for DP-FedAvg at ε = 8."""
    config, server = cell.config, cell.config.server
    step = 16.0 if config.epsilon == 8 and not config.method else 8.0
    best = server.part_name == "momentum" and server.learning_rate == step and config.clip_norm == 0.03
    return (0.7 if best else 0.6) if cell.table == "table1-tune" else None


def test_tuned__settings_of_the_repository_are_the_best_or_provisional() -> None:
    assert tuning_state(read_document(CHENG), "table1-tuned").wrong == ()


def test_tuned__is_provisional_until_every_tuning_cell_is_measured(tmp_path: Path) -> None:
    state = tuning_state(
        _document(tmp_path, lambda cell: None if cell.config.epsilon == 8 else _tuning(cell)), "table1-tuned"
    )
    assert state.provisional
    assert str(state).startswith("PROVISIONAL: 20 of 40")


def test_tuned__the_best_of_all_tuning_cells_is_accepted(tmp_path: Path) -> None:
    state = tuning_state(_document(tmp_path, _tuning), "table1-tuned")
    assert not state.provisional
    assert state.wrong == ()
    assert str(state).startswith("Settings are the best of `table1-tune`")


def test_tuned__a_setting_that_is_not_the_best_is_named(tmp_path: Path) -> None:
    def other(cell: Cell) -> float | None:
        better = cell.config.clip_norm == 0.3 and cell.config.server.learning_rate == 0.2
        return 0.9 if cell.table == "table1-tune" and better and not cell.config.method else _tuning(cell)

    state = tuning_state(_document(tmp_path, other), "table1-tuned")
    assert "DP-FedAvg | epsilon=2: clip_norm: 0.03 -> 0.3" in state.wrong
    assert not any(line.startswith("BLUR + LUS") for line in state.wrong)
    assert "NOT THE BEST" in str(state)
