"""Figures of docs/guides/recommendations.md: examples/ratings.py and examples/next_game.py on the real files.

python -m benchmarks.recommendations ratings --data FOLDER
python -m benchmarks.recommendations next-game --data FOLDER
python -m benchmarks.recommendations show                       the tables, from benchmarks/results/recommendations.json

A run that is in the results already is not repeated. Seeded runs on public data: they protect nobody.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedblur.core.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recommendations.json"
EPSILONS = (8.0, 2.0, math.inf)
SEEDS = (0, 1, 2)
RATING_BASELINES = (
    "the site's public mean rating, nothing learned",
    "title means",
    "least squares on the public features",
    "the site's public mean rating, and each user's mean of what is left",
    "title means and user means",
    "least squares and user means",
)
GAME_BASELINES = ("names alike, nothing learned", "popularity", "EASE, all pairs of games")

Figures = dict[str, float]


def ratings(folder: Path, evaluate: str) -> Iterator[tuple[str, float | None, int | None, Callable[[], Figures]]]:
    """Yield each row's name, ε, seed and how to measure it; ε is None where nothing is learned with noise."""
    from examples import ratings as example

    data = example.load(folder)
    baselines = cache(partial(_rating_baselines, example, data, evaluate))
    for name in RATING_BASELINES:
        yield name, None, None, lambda name=name: baselines()[name]  # type: ignore[misc]
    for name in example.MODELS:
        for seed in SEEDS:
            for epsilon in EPSILONS:

                def measure(name: str = name, epsilon: float = epsilon, seed: int = seed) -> Figures:
                    with tempfile.TemporaryDirectory() as out:
                        run = example.train(data, name, evaluate, Path(out) / "run", epsilon=epsilon, seed=seed)
                        return {"rmse": example.rmse(run), "parameters": float(run.record.parameters)}

                yield name, epsilon, seed, measure


def _rating_baselines(example: Any, data: Any, evaluate: str) -> dict[str, Figures]:
    """Return RMSE of what needs no federation: none is private but the first, which learns nothing."""
    part = example.parts(data.users)
    test = part == (example.TEST if evaluate == "test" else example.VALIDATION)
    train = (part != example.TEST) & ~test
    users, titles = 1 + int(data.users.max()), len(data.features)

    def means(who: np.ndarray, what: np.ndarray, count: int) -> np.ndarray:
        return np.bincount(who, what, count) / np.maximum(np.bincount(who, minlength=count), 1)

    def error(predicted: np.ndarray) -> Figures:
        return {"rmse": float(np.sqrt(np.mean((data.stars - predicted)[test] ** 2)))}

    site = data.mean_rating[data.titles].astype(float)
    middle = data.stars[train].mean()
    title = middle + means(data.titles[train], data.stars[train] - middle, titles)[data.titles]
    columns = np.c_[data.features, np.ones(titles)].astype(float)[data.titles]
    squares = columns @ np.linalg.lstsq(columns[train], data.stars[train], rcond=None)[0]

    def with_own(predicted: np.ndarray) -> Figures:
        return error(predicted + means(data.users[train], (data.stars - predicted)[train], users)[data.users])

    figures = [error(site), error(title), error(squares), with_own(site), with_own(title), with_own(squares)]
    return dict(zip(RATING_BASELINES, figures, strict=True))


def next_game(folder: Path, evaluate: str) -> Iterator[tuple[str, float | None, int | None, Callable[[], Figures]]]:
    """Yield each row's name, ε, seed and how to measure it."""
    from examples import next_game as example

    data = example.load(folder)
    baselines = cache(partial(_game_baselines, example, data, evaluate))
    for name in GAME_BASELINES:
        yield name, None, None, lambda name=name: baselines()[name]  # type: ignore[misc]
    for name in example.MODELS:
        for seed in SEEDS:
            for epsilon in EPSILONS:

                def measure(name: str = name, epsilon: float = epsilon, seed: int = seed) -> Figures:
                    with tempfile.TemporaryDirectory() as out:
                        run = example.train(data, name, evaluate, Path(out) / "run", epsilon=epsilon, seed=seed)
                        found = {metric.partition("@")[0]: value for metric, value in run.metrics.items()}
                        return {**found, "parameters": float(run.record.parameters)}

                yield name, epsilon, seed, measure


def _game_baselines(example: Any, data: Any, evaluate: str) -> dict[str, Figures]:
    """Return figures of what needs no federation. None is private but the first, which learns nothing."""
    train, held = example.histories(data, evaluate)
    games = len(data.names)
    owned = np.zeros((len(train), games), dtype=np.float32)
    for user, own in enumerate(train):
        owned[user, own] = 1
    tested = np.flatnonzero(np.array(held) >= 0)
    target = np.array(held)[tested]

    def measure(scores: np.ndarray) -> Figures:
        scores = np.where(owned[tested] > 0, -np.inf, scores)
        own = scores[np.arange(len(tested)), target][:, None]
        rank = (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2  # ties: the middle
        return {
            "hit_rate": float((rank < 10).mean()),
            "ndcg": float(np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean()),
        }

    features = example.name_features(data.names, 64)
    names = (owned[tested] @ features) @ features.T
    bought = owned.sum(0)
    together = owned.T @ owned + 50 * np.eye(games, dtype=np.float32)
    inverse = np.linalg.inv(together)
    weights = -inverse / np.diag(inverse)  # EASE (Steck 2019): a linear model of all pairs of games
    np.fill_diagonal(weights, 0)
    popular = np.broadcast_to(bought, (len(tested), games))
    figures = [measure(names), measure(popular), measure(owned[tested] @ weights)]
    return dict(zip(GAME_BASELINES, figures, strict=True))


STUDIES = {"ratings": ratings, "next-game": next_game}
COLUMNS = {"ratings": {"rmse": "RMSE"}, "next-game": {"hit_rate": "hit rate at 10", "ndcg": "NDCG at 10"}}


def run_study(study: str, folder: Path, evaluate: str, kept: Path, only: str | None, seeds: Sequence[int]) -> None:
    """Measure what is missing. Figures on validation data, for tuning, are shown and not kept."""
    rows = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() and evaluate == "test" else []
    there = {(row["study"], row["name"], row["epsilon"], row["seed"]) for row in rows}
    for name, epsilon, seed, measure in STUDIES[study](folder, evaluate):
        shown = "inf" if epsilon == math.inf else epsilon
        if (study, name, shown, seed) in there or only not in (None, name) or seed not in (None, *seeds):
            continue
        before = time.process_time()
        figures = {key: round(value, 5) for key, value in measure().items()}
        cpu = round(time.process_time() - before, 1)
        rows.append({"study": study, "name": name, "epsilon": shown, "seed": seed, "cpu_s": cpu, **figures})
        print(rows[-1], flush=True)
        if evaluate == "test":
            write_atomically(kept, ("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n").encode())


def table(study: str, kept: Path) -> str:
    """Return a study's results: the mean over seeds, ± its standard error."""
    rows = [row for row in json.loads(kept.read_text(encoding="utf-8")) if row["study"] == study]
    columns = [(f"{words}, {shown}", column, epsilon) for column, words in COLUMNS[study].items()
               for shown, epsilon in (("ε = ∞", "inf"), ("ε = 8", 8.0), ("ε = 2", 2.0))]  # fmt: skip
    lines = [f"| | shared parameters | {' | '.join(title for title, _, _ in columns)} |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        cells = [f"{mine[0]['parameters']:,.0f}" if "parameters" in mine[0] else "–"]
        for _, column, epsilon in columns:
            wanted = (epsilon, None) if epsilon == "inf" else (epsilon,)  # what has no ε has no noise
            found = [row[column] for row in mine if row["epsilon"] in wanted]
            cells.append(_mean(found) if found else "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES, "show"])
    parser.add_argument("--data", type=Path, help="the folder with the real files")
    parser.add_argument("--evaluate", choices=["test", "validation"], default="test")
    parser.add_argument("--only", help="a single row, by its name")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.study != "show":
        if given.data is None:
            parser.error("--data FOLDER says where the files are")
        run_study(given.study, given.data, given.evaluate, given.results, given.only, given.seeds)
    for study in STUDIES if given.study == "show" or given.evaluate == "test" else ():
        print(f"\n{study}\n\n{table(study, given.results)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
