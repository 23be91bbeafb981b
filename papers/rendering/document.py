"""The material of a page: tables as files, their results, and the paper's own figures. Out: questions answered.

FOLDER/*.toml              tables (`table_spec.py`); results where they say
FOLDER/page/paper.toml     the paper's printed figures with their source, the page's plots, tuning tables
FOLDER/page/claims.toml    what the paper claims, each with the rule that decides it (`claims.py`)
FOLDER/page/README.md.jinja   the prose, without a single typed figure
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedblur.core.config import read_toml
from fedblur.core.errors import ConfigError, nearest
from fedblur.experiments.forecast import Forecast, forecast
from fedblur.experiments.result_store import Result, Results
from fedblur.experiments.table_spec import Cell, Spec, read_spec

DEVICE = "cuda"  # what costs are stated for
Printed = dict[str, dict[str, tuple[float, float | None]]]  # table of the paper -> row -> accuracy, ±


@dataclass(frozen=True)
class Group:
    """The cells of one printed row, over seeds, with their results where there are any."""

    label: str
    axes: dict[str, Any]
    cells: tuple[Cell, ...]
    results: tuple[Result, ...]

    @property
    def by_seed(self) -> dict[int, float]:
        """Return accuracy by seed, in percent, final round."""
        return {int(result["axes"].get("seed", 0)): 100 * float(result["accuracy"]) for result in self.results}

    @property
    def accuracy(self) -> float | None:
        return statistics.mean(self.by_seed.values()) if self.results else None

    @property
    def spread(self) -> float | None:
        """Return the sample standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


@dataclass(frozen=True)
class Document:
    """A folder's tables with their results. Nothing in it is typed by hand but the paper's own figures."""

    folder: Path
    specs: dict[str, Spec]
    results: Results
    printed: Printed
    sources: dict[str, str] = field(default_factory=dict)  # spec -> the paper's table
    figures: tuple[dict[str, Any], ...] = ()
    tuning: dict[str, str] = field(default_factory=dict)  # tuned table -> its tuning table
    claims: tuple[dict[str, Any], ...] = ()

    def spec(self, name: str) -> Spec:
        if name not in self.specs:
            raise ConfigError(f"{self.folder}: no table {name!r}: {nearest(name, self.specs)}")
        return self.specs[name]

    def groups(self, name: str) -> list[Group]:
        """Return a table's rows in the order of the file, measured or not."""
        self.spec(name)
        return self._groups[name]

    @functools.cached_property
    def _groups(self) -> dict[str, list[Group]]:
        tables: dict[str, dict[str, list[Cell]]] = {name: {} for name in self.specs}
        for name, spec in self.specs.items():
            for cell in spec.cells:
                tables[name].setdefault(cell.group, []).append(cell)
        return {name: [_group(cells, self.results.found) for cells in rows.values()] for name, rows in tables.items()}

    def group(self, name: str, label: str, axes: Mapping[str, Any]) -> Group | None:
        """Return the row with this label whose axes are among the given ones."""
        rows = (row for row in self.groups(name) if row.label == label and row.axes.items() <= axes.items())
        return next(rows, None)

    @functools.cached_property
    def forecasts(self) -> dict[str, Forecast]:
        """Forecast noise, R and time of every cell, by table."""
        return {name: forecast(spec, self.results, DEVICE) for name, spec in self.specs.items()}

    def own_results(self, names: Iterable[str] | None = None) -> list[Result]:
        """Return the results that a cell of these tables has, each once."""
        specs = self.specs.values() if names is None else [self.spec(name) for name in names]
        keys = dict.fromkeys(cell.key for spec in specs for cell in spec.cells)
        return [self.results.found[key] for key in keys if key in self.results.found]


def _group(cells: list[Cell], found: Mapping[str, Result]) -> Group:
    # A result may have been computed for another table: what it is called here is what the cell says.
    results = [found[cell.key] | {"axes": cell.axes} for cell in cells if cell.key in found]
    return Group(cells[0].label, cells[0].shown, tuple(cells), tuple(results))


def read_document(folder: Path, results: Path | None = None) -> Document:
    """Read everything in the folder; `results` replaces the folder that the tables name."""
    page = folder / "page"
    about = read_toml(page / "paper.toml")
    specs = {path.stem: read_spec(path) for path in sorted(folder.glob("*.toml"))}
    if not specs:
        raise ConfigError(f"{folder} has no tables; give a folder with TOML files such as papers/cheng2022")
    folders = {spec.results or folder / "results" for spec in specs.values()}
    if results is None and len(folders) > 1:
        raise ConfigError(f"{folder}: its tables keep results in {len(folders)} folders; a page needs one")
    claims = read_toml(page / "claims.toml") if (page / "claims.toml").exists() else {}
    document = Document(
        folder,
        specs,
        Results(results or folders.pop()),
        _printed(about.get("printed", {})),
        about.get("sources", {}),
        tuple(about.get("figures", [])),
        about.get("tuning", {}),
        tuple(claims.get("claims", [])),
    )
    _check_names(document)
    return document


def _printed(tables: Mapping[str, Mapping[str, Any]]) -> Printed:
    """Read `"DP-FedAvg | epsilon=2" = [69.65, 0.74]`, or a number alone where the paper gives no ±."""

    def pair(value: Any) -> tuple[float, float | None]:
        return (float(value[0]), float(value[1])) if isinstance(value, list) else (float(value), None)

    return {name: {row: pair(value) for row, value in rows.items()} for name, rows in tables.items()}


def _check_names(document: Document) -> None:
    named = [*document.sources, *document.tuning, *document.tuning.values()]
    named += [figure["table"] for figure in document.figures if "table" in figure]
    named += [
        part[key] for claim in document.claims for part in claim["parts"] for key in ("table", "than") if key in part
    ]
    for name in named:
        document.spec(name)
    for source in document.sources.values():
        if source not in document.printed:
            raise ConfigError(f"paper.toml: no printed table {source!r}: {nearest(source, document.printed)}")
