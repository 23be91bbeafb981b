"""Ratings of titles by users: what everyone likes is learned together, what one user likes stays with that user.

    python examples/ratings.py                   # on generated ratings, in seconds
    python examples/ratings.py --data FOLDER     # on anime_ratings.tsv.gz and anime_items.tsv.gz

docs/guides/recommendations.md explains it and has results.
"""

import argparse
import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    features: np.ndarray  # [titles, features], public: genres, type, mean rating, members, episodes
    mean_rating: np.ndarray  # [titles], public: of all users of the site
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
    return Ratings(users, row[ids], stars.astype(np.float32), public_features(items), mean_ratings(items), texts)


def mean_ratings(items: list[dict[str, str]]) -> np.ndarray:
    """Return the site's own mean rating of each title."""
    return np.array([float(item["mean_rating"]) for item in items], dtype=np.float32)


def public_features(items: list[dict[str, str]]) -> np.ndarray:
    """Return a row for each title. Scales and categories come from the public items alone."""
    genres = [set(item["genres"].split(", ")) for item in items]
    columns = [[genre in own for own in genres] for genre in sorted(set().union(*genres) - {""})]
    columns += [[item["type"] == kind for item in items] for kind in sorted({item["type"] for item in items})]
    for numbers in (
        mean_ratings(items),
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
            "type": ("TV", "Movie")[title % 2],
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
    stars = stars.round().clip(1, 10).astype(np.float32)
    return Ratings(who, what, stars, public_features(items), mean_ratings(items), texts)


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


def federation(ratings: Ratings, evaluate: str = "test", counted: int = 0) -> fedblur.Federation:
    """Make a federation whose users are clients. Settings are tuned on "validation", which test ratings never join.

    `counted` adds a weight to each target: the user's number of ratings, at most `counted`, as a share of it.
    """
    part = parts(ratings.users)
    test = part == (TEST if evaluate == "test" else VALIDATION)
    train = (part != TEST) & ~test
    targets = ratings.stars
    if counted:
        weights = np.bincount(ratings.users[train]).clip(max=counted) / counted
        targets = np.stack([ratings.stars, weights[ratings.users]], axis=1)  # [ratings, 2]
    return fedblur.federation_from_arrays(
        ratings.titles[train, None],
        targets[train],
        ratings.users[train],
        ratings.titles[test, None],
        targets[test],
        test_owners=ratings.users[test],
    )


class Taste(nn.Module):
    """What all users make of a title, from its public features, and how one user differs from them."""

    def __init__(self, ratings: Ratings, bias: bool = False, tastes: int = 0, titles: bool = False):
        super().__init__()
        fame = np.exp(ratings.features[:, -2])  # of members: known titles set what is the middle
        features = ratings.features - np.average(ratings.features, axis=0, weights=fame)
        # of length 1: with the biases, steps below 1/4 are stable whatever a user rates
        features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
        self.register_buffer("features", torch.from_numpy(features))  # public constants: neither trained nor sent
        self.register_buffer("mean_rating", torch.from_numpy(ratings.mean_rating))
        self.quality = nn.Linear(features.shape[1], 1)
        nn.init.zeros_(self.quality.weight)
        nn.init.zeros_(self.quality.bias)
        self.titles = nn.Parameter(torch.zeros(len(features))) if titles else None
        self.user_bias = nn.Parameter(torch.zeros(1)) if bias else None
        tastes = min(tastes, features.shape[1])
        self.user_taste = nn.Parameter(torch.zeros(tastes)) if tastes else None
        # A taste is about the features' principal directions, which are public too. If they were trained beside tastes,
        # the product of both could diverge on a client, and nothing clips a user's own part.
        directions = np.linalg.svd(features * np.sqrt(fame / fame.sum())[:, None], full_matrices=False)[2]
        self.register_buffer("kinds", torch.from_numpy((features @ directions[:tastes].T).astype(np.float32)))

    def forward(self, title):
        title = title[:, 0]
        features = self.features[title]
        stars = self.mean_rating[title] + self.quality(features)[:, 0]
        if self.titles is not None:
            stars = stars + self.titles[title]
        if self.user_bias is not None:
            stars = stars + self.user_bias
        if self.user_taste is not None:
            stars = stars + self.kinds[title] @ self.user_taste
        return stars[:, None]


MODELS: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear, one more parameter a title": {"titles": True},
    "linear, own bias": {"bias": True},
    "linear, own bias and taste": {"bias": True, "tastes": 16},
}


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The squared error, weighted: a mean over ratings counts those who rate much, a mean of updates does not."""
    stars, weights = targets.T
    return weights * (outputs[:, 0] - stars).square()


@fedblur.metric("squared_error")
def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The squared error of each rating; RMSE is the root of its mean."""
    return (outputs[:, 0] - targets[:, 0]).square()


# Chosen on validation ratings, at epsilon 8 and seed 0, and by the rule for stable steps above.
SHARED_ALONE: dict[str, Any] = {  # a step a round: further steps would undo the weights
    "rounds": 60,
    "clip_norm": 0.1,
    "local": fedblur.LocalTraining(steps=1, batch_size=256, learning_rate=0.1),
    "server": {"name": "momentum", "learning_rate": 3.0, "momentum": 0.9, "schedule": "cosine"},
}
WITH_OWN_PARTS: dict[str, Any] = {
    "rounds": 20,
    "clip_norm": 0.3,
    "local": fedblur.LocalTraining(steps=5, batch_size=64, learning_rate=0.2),
    "personal": ["user_*"],  # these parameters stay with each user
    "personal_steps": 25,  # before a user's model is measured: most users were in few rounds, some in none
}


def train(ratings: Ratings, model: str, evaluate: str = "test", out: Path | None = None, **changes: Any) -> fedblur.Run:
    """Train privately."""
    module = Taste(ratings, **MODELS[model])
    own = module.user_bias is not None
    data = federation(ratings, evaluate, counted=50 if own else 200)
    settings = WITH_OWN_PARTS if own else SHARED_ALONE
    settings = {"epsilon": 8.0, "delta": "N^-1.1", "sample_rate": 0.1, **settings, **changes}
    config = fedblur.Config(metrics=["squared_error"], eval_every=settings["rounds"], **settings)
    return fedblur.train(config, federation=data, module=module, loss=loss, out=out)


def rmse(run: fedblur.Run) -> float:
    """Return the RMSE on held-out ratings: of each user's own model if users have one."""
    return float((run.personal_figures or run.metrics)["squared_error"]) ** 0.5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the real ratings")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--model", choices=list(MODELS), default="linear, own bias and taste")
    given = parser.parse_args()
    run = train(stand_in() if given.data is None else load(given.data), given.model, epsilon=given.epsilon)
    statement, path = fedblur.write_statement(run.path)
    print(f"RMSE {rmse(run):.3f} on held-out ratings of the same users, {given.model}")
    print(f"{statement.one_line()}: {path}")
