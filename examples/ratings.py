"""Ratings of titles by users: what everyone likes is learned together, what one user likes stays with that user.

python examples/ratings.py                   # on generated ratings, in seconds
python examples/ratings.py --data FOLDER     # on anime_ratings.tsv.gz and anime_items.tsv.gz
"""

import argparse
import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedblur

TRAIN, VALIDATION, TEST = range(3)


@dataclass(frozen=True)
class Ratings:
    """Who gave which title how many stars, and what is public about titles."""

    users: np.ndarray  # [ratings], 0..N-1
    titles: np.ndarray  # [ratings], a row of `features`
    stars: np.ndarray  # [ratings], 1 to 10
    features: np.ndarray  # [titles, features]: genres, type, episodes, mean rating, members
    texts: tuple[str, ...]  # of each title: its name and genres


def load(folder: Path) -> Ratings:
    """Read ratings (user, item, rating) and the public items. No constant comes from the ratings."""
    with gzip.open(folder / "anime_items.tsv.gz", "rt", encoding="utf-8", newline="") as file:
        items = list(csv.DictReader(file, delimiter="\t"))
    names, ids, stars = np.loadtxt(folder / "anime_ratings.tsv.gz", skiprows=1, dtype=np.int64).T
    users = np.unique(names, return_inverse=True)[1]  # numbers without gaps
    row = np.full(1 + max(int(item["item"]) for item in items), -1)
    row[[int(item["item"]) for item in items]] = np.arange(len(items))
    texts = tuple(f"{item['name']}: {item['genres']}" for item in items)
    return Ratings(users, row[ids], stars.astype(np.float32), public_features(items), texts)


def public_features(items: list[dict[str, str]]) -> np.ndarray:
    """Return a row for each title. Scales and categories come from the public items alone."""
    genres = [set(item["genres"].split(", ")) for item in items]
    columns = [[genre in own for own in genres] for genre in sorted(set().union(*genres) - {""})]
    columns += [[item["type"] == kind for item in items] for kind in sorted({item["type"] for item in items})]
    for numbers in (
        np.array([float(item["mean_rating"]) for item in items]),
        np.log([float(item["members"]) for item in items]),
        np.log([float(item["episodes"]) for item in items]),
    ):
        columns.append((numbers - numbers.mean()) / numbers.std())
    return np.array(columns, dtype=np.float32).T


def stand_in(users: int = 300, titles: int = 60, seed: int = 0) -> Ratings:
    """Generate ratings: titles have genres and a quality, users are generous or strict and have tastes."""
    rng = np.random.default_rng(seed)
    names = ("Comedy", "Drama", "Horror", "Sports")
    has = rng.random((titles, len(names))) < 0.4
    quality = rng.normal(0, 0.8, titles)
    items = [
        {
            "name": f"Title {title}",
            "genres": ", ".join(name for name, there in zip(names, has[title]) if there),
            "type": "TV",
            "episodes": str(rng.integers(1, 50)),
            "mean_rating": str(7 + quality[title]),
            "members": str(rng.integers(100, 10000)),
        }
        for title in range(titles)
    ]
    who = np.repeat(np.arange(users), rng.integers(5, 25, users))
    what = rng.integers(0, titles, len(who))
    bias, taste = rng.normal(0, 1, users), rng.normal(0, 0.8, (users, len(names)))
    stars = 7 + quality[what] + bias[who] + (taste[who] * has[what]).sum(1) + rng.normal(0, 0.8, len(who))
    texts = tuple(f"{item['name']}: {item['genres']}" for item in items)
    features = public_features([{**item, "type": kind} for item, kind in zip(items, ["TV", "Movie"] * titles)])
    return Ratings(who, what, stars.round().clip(1, 10).astype(np.float32), features, texts)


def parts(users: np.ndarray, seed: int = 0) -> np.ndarray:
    """Say of each rating whether it trains, validates (a tenth of each user's) or tests (a fifth), by lot."""
    lots = np.random.default_rng(seed).random(len(users))
    order = np.lexsort((lots, users))  # user by user, each user's ratings in the order of their lots
    sizes = np.bincount(users)
    rank = np.arange(len(users)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    part = np.full(len(users), TRAIN)
    part[order[rank < (3 * np.repeat(sizes, sizes)) // 10]] = VALIDATION
    part[order[rank < np.repeat(sizes, sizes) // 5]] = TEST
    return part


def federation(ratings: Ratings, evaluate: str = "test") -> fedblur.Federation:
    """Make a federation whose users are clients. Settings are tuned on "validation", which test ratings never join."""
    part = parts(ratings.users)
    test = part == (TEST if evaluate == "test" else VALIDATION)
    train = (part != TEST) & ~test
    return fedblur.federation_from_arrays(
        ratings.titles[train, None],
        ratings.stars[train],
        ratings.users[train],
        ratings.titles[test, None],
        ratings.stars[test],
        test_owners=ratings.users[test],
    )


class Taste(nn.Module):
    """A title's quality from its public features, the same for everyone, and how generous one user is."""

    def __init__(self, features: np.ndarray):
        super().__init__()
        self.register_buffer("features", torch.from_numpy(features))  # public constants: neither trained nor sent
        self.quality = nn.Linear(features.shape[1], 1)
        nn.init.zeros_(self.quality.weight)
        nn.init.constant_(self.quality.bias, 7)  # the middle of the stars that people give
        self.user_bias = nn.Parameter(torch.zeros(1))

    def forward(self, title):
        return self.quality(self.features[title[:, 0]]) + self.user_bias


def train(ratings: Ratings, epsilon: float, seed: int | None = None, evaluate: str = "test") -> fedblur.Run:
    """Train privately: each user's own bias stays with that user."""
    config = fedblur.Config(
        task="regression",
        personal=["user_*"],
        personal_steps=30,
        epsilon=epsilon,
        delta="N^-1.1",
        rounds=30,
        sample_rate=0.2,
        clip_norm=0.5,
        eval_every=30,
        seed=seed,
        local=fedblur.LocalTraining(steps=5, batch_size=64, learning_rate=0.05),
    )
    return fedblur.train(config, federation=federation(ratings, evaluate), module=Taste(ratings.features))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the real ratings")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--seed", type=int, help="for tests: a seeded run is not private")
    given = parser.parse_args()
    run = train(stand_in() if given.data is None else load(given.data), given.epsilon, given.seed)
    alone, shared = run.personal_figures["rmse"], run.record.figures["rmse"]
    print(f"RMSE {alone:.3f} with each user's own bias, {shared:.3f} without it")
    print(f"epsilon {run.epsilon:.2f}; statement: {fedblur.write_statement(run.path)[1]}")
