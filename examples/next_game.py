"""The next game of each user, from the games that the user has and the names of all games.

python examples/next_game.py                   # on generated purchases, in seconds
python examples/next_game.py --data FOLDER     # on steam_purchases.tsv.gz and steam_items.tsv.gz
"""

import argparse
import csv
import gzip
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedblur

MOST = 64  # games of a user that are read; of more, a random 64


@dataclass(frozen=True)
class Purchases:
    """Who has which game, and the games' public names."""

    users: np.ndarray  # [purchases], 0..N-1
    games: np.ndarray  # [purchases], 0..games-1
    names: list[str]


def load(folder: Path) -> Purchases:
    """Read purchases (user, item, bought) and the public names of items."""
    with gzip.open(folder / "steam_items.tsv.gz", "rt", encoding="utf-8", newline="") as file:
        names = {int(item["item"]): item["name"] for item in csv.DictReader(file, delimiter="\t")}
    pairs = np.loadtxt(folder / "steam_purchases.tsv.gz", skiprows=1, usecols=(0, 1), dtype=np.int64)
    users, games = np.unique(pairs, axis=0).T
    place = np.zeros(1 + max(names), dtype=np.int64)
    place[list(names)] = np.arange(len(names))
    return Purchases(np.unique(users, return_inverse=True)[1], place[games], list(names.values()))


def stand_in(users: int = 400, seed: int = 0) -> Purchases:
    """Generate purchases: series of games with a word in common; users stay with two series, mostly well known ones."""
    rng = np.random.default_rng(seed)
    series = ["Castle", "Dragon", "Empire", "Football", "Galaxy", "Harbour", "Island", "Jungle"]
    names = [f"{word} {number}" for word in series for number in range(1, 6)]
    fame = 1 / np.arange(1, len(series) + 1)
    pairs = []
    for user in range(users):
        for one in rng.choice(len(series), 2, replace=False, p=fame / fame.sum()):
            pairs += [(user, 5 * one + game) for game in rng.choice(5, rng.integers(1, 5), replace=False)]
    who, games = np.array(pairs).T
    return Purchases(who, games, names)


def name_features(names: list[str], size: int) -> np.ndarray:
    """Return a vector for each name, from words that names share (tf-idf, then SVD); of length 1, or 0 if none is."""
    words = [re.findall(r"[a-z0-9]+", name.lower()) for name in names]
    grams = [dict.fromkeys([*own, *pairwise(own)]) for own in words]  # in the order of the name, in any process
    count = Counter(gram for own in grams for gram in own)
    column = {gram: i for i, gram in enumerate(gram for gram, times in count.items() if times > 1)}
    table = torch.zeros(len(names), len(column))
    for row, own in enumerate(grams):
        for gram in own.keys() & column.keys():
            table[row, column[gram]] = np.log(len(names) / count[gram])
    table = nn.functional.normalize(table)
    torch.manual_seed(0)
    left, scale, _ = torch.svd_lowrank(table, q=min(size, *table.shape), niter=4)
    return nn.functional.normalize(left * scale).numpy()


def histories(purchases: Purchases, evaluate: str, seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Return each user's games for training, and the game held out (-1: none).

    The first game by lot is for test, of those who have two; the second for validation, of those who have three.
    """
    lots = np.random.default_rng(seed).random(len(purchases.users))
    order = np.lexsort((lots, purchases.users))
    own = np.split(purchases.games[order], np.cumsum(np.bincount(purchases.users))[:-1])
    train, held = [], []
    for games in (each[:MOST] for each in own):
        test, validation = len(games) > 1, len(games) > 2
        if evaluate == "test":
            held.append(int(games[0]) if test else -1)
            train.append(games[test:])
        else:
            held.append(int(games[1]) if validation else -1)
            train.append(games[test + validation :])
    return train, held


def federation(purchases: Purchases, evaluate: str = "test") -> fedblur.Federation:
    """Make a federation: a sample is a game to predict (y) and the user's others (x). Settings see "validation"."""
    train, held = histories(purchases, evaluate)
    nothing = len(purchases.names)  # fills up the list of others
    x = np.full((sum(map(len, train)), MOST - 1), nothing)
    test_x = np.full((len(held), MOST - 1), nothing)
    start = 0
    for user, own in enumerate(train):
        for i in range(len(own)):
            x[start + i, : len(own) - 1] = np.delete(own, i)
        test_x[user, : len(own)] = own
        start += len(own)
    tested = np.array(held) >= 0
    owners = np.repeat(np.arange(len(train)), [len(own) for own in train])
    return fedblur.federation_from_arrays(
        x, np.concatenate(train), owners, test_x[tested], np.array(held)[tested], classes=nothing
    )


class NextGame(nn.Module):
    """A score for each game: how popular it is, and how well it fits the user's games.

    Games are vectors made of their names. Either these stay as they are, and how names fit each other is learned, or
    they are only the beginning.
    """

    def __init__(self, features: np.ndarray, learn_vectors: bool = False):
        super().__init__()
        games, size = features.shape
        vectors = nn.functional.pad(torch.from_numpy(features), (0, 0, 0, 1))  # the last one is no game
        self.popularity = nn.Parameter(torch.zeros(games))
        self.fit = None
        if learn_vectors:
            self.vectors = nn.Parameter(3**0.5 * vectors)  # names that agree: a score of 3
        else:
            self.register_buffer("vectors", vectors)  # public constants: neither trained nor sent
            self.fit = nn.Linear(size, size, bias=False)
            self.fit.weight.data = 3 * torch.eye(size)

    def forward(self, games):
        there = games < len(self.popularity)
        own = self.vectors[games] * there[..., None]  # [samples, MOST - 1, size]
        taste = own.sum(1) / there.sum(1, keepdim=True).clamp(min=1).sqrt()
        if self.fit is not None:
            taste = self.fit(taste)
        scores = taste @ self.vectors[:-1].T + self.popularity  # [samples, games]
        mine = nn.functional.pad(scores, (0, 1)).scatter(1, games, -100.0)  # nobody buys a game again
        return mine[:, :-1]


MODELS: dict[str, dict[str, Any]] = {
    "popularity and names": {"size": 32},
    "popularity and vectors that begin with names": {"size": 32, "learn_vectors": True},
}


def train(
    purchases: Purchases, model: str, evaluate: str = "test", out: Path | None = None, **changes: Any
) -> fedblur.Run:
    """Train privately. Settings were chosen on validation games, at epsilon 8 and seed 0."""
    settings = {
        "task": "ranking",  # softmax over all games; NDCG@10 and the hit rate at 10
        "epsilon": 8.0,
        "delta": "N^-1.1",
        "rounds": 30,
        "sample_rate": 0.04,
        "clip_norm": 0.3,
        "eval_every": 30,
        "local": fedblur.LocalTraining(steps=1, batch_size=4, learning_rate=1.0),
        "server": {"name": "momentum", "learning_rate": 20.0, "momentum": 0.9, "schedule": "cosine"},
        **changes,
    }
    chosen = dict(MODELS[model])
    module = NextGame(name_features(purchases.names, chosen.pop("size")), **chosen)
    return fedblur.train(fedblur.Config(**settings), federation=federation(purchases, evaluate), module=module, out=out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the real purchases")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--model", choices=list(MODELS), default="popularity and names")
    given = parser.parse_args()
    if given.data is None:  # few users: more of them in each round
        run = train(stand_in(), given.model, epsilon=given.epsilon, sample_rate=0.5)
    else:
        run = train(load(given.data), given.model, epsilon=given.epsilon)
    statement, path = fedblur.write_statement(run.path)
    print(f"hit rate at 10: {run.metrics['hit_rate@10']:.3f}, NDCG at 10: {run.metrics['ndcg@10']:.3f}")
    print(f"{statement.one_line()}: {path}")
