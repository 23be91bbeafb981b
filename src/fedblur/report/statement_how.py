"""The part of a privacy statement on how a run protected its clients: bound, noise, sampling, and what is enforced."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedblur.registry import build
from fedblur.report.page import Section
from fedblur.report.statement_words import counted
from fedblur.runfolder import RunFolder

if TYPE_CHECKING:
    from fedblur.report.statement import Statement


def how(statement: Statement) -> Section:
    privacy, spends = statement.privacy, statement.books.spends
    rows = [("mechanism", _mechanism(statement))]
    if statement.votes:
        each = f"{privacy['queries']:,} queries"
        rows.append(("noise", f"standard deviation {privacy['vote_noise_std']:.4g} on every count of votes, {each}"))
    else:
        rows += [
            ("bounded contribution", f"the l2 norm of each client's whole update is {_bounding(statement)}"),
            ("noise", f"{_noise(statement)}, on {privacy['support']}"),
            ("denominator", f"the constant pN = {privacy['expected_cohort']:g}; no client weights"),
        ]
    methods = " and ".join(method["name"] for method in statement.config["method"])
    if methods and not statement.votes:
        words = "inside each client, before its update is bounded: what is claimed does not depend on it"
        rows.append(("local method", f"{methods}, {words}"))
    repeated = len(spends) - len({round_ for round_, _ in spends})
    rows += [
        ("sampling", privacy["sampling"]),
        ("releases", f"{len(spends)}" + (f", {repeated} of them rounds repeated after a crash" if repeated else "")),
        ("epsilon is enforced", f"{_budget(statement)} is refused before it starts"),
    ]
    return Section("How", "", rows)


def _budget(statement: Statement) -> str:
    budget = statement.books.budget
    limit = f"ε = {budget.epsilon:g} or " if math.isfinite(budget.epsilon) else ""
    if statement.votes or statement.chosen:
        return f"a release that would exceed {limit}the {counted(budget.rounds, 'release')} that was planned"
    return f"a round that would exceed {limit}the planned {counted(budget.rounds, 'round')}"


def _noise(statement: Statement) -> str:
    """How much there is on the sum; σ alone would be untrue where a bit or a larger cohort changes it."""
    privacy, config = statement.privacy, statement.config
    sigma = privacy["noise_multiplier"]
    if config.get("clipping"):
        with RunFolder(statement.run).reading():
            alone = build("clipping", config["clipping"]).vector_multiplier(sigma, privacy["expected_cohort"])
        return f"σ = {sigma:.4g} for an update and its clip bit together: {alone:.4g} times the round's S on the sum"
    least = config["mechanism"].get("min_cohort")
    more = f" of {least} clients, and √(n/{least}) times that on the sum of n" if least else ""
    return f"σ = {sigma:.4g}, standard deviation σ·S on the sum{more}"


_MECHANISMS = {
    "gaussian": "Gaussian noise on the sum of bounded updates",
    "ddgauss": "discrete Gaussian noise on whole numbers, summed modulo a power of two (DDGauss)",
    "skellam": "Skellam noise on whole numbers, summed modulo a power of two",
}


def _mechanism(statement: Statement) -> str:
    settings = statement.config["mechanism"]
    if statement.privacy["clip_norm"] is None or settings["name"] not in _MECHANISMS:
        return str(statement.privacy["mechanism"])
    others = ", ".join(f"{key} = {value}" for key, value in settings.items() if key != "name")
    return f"{_MECHANISMS[settings['name']]} ({others})"


def _bounding(statement: Statement) -> str:
    now, words = float(statement.privacy["clip_norm"]), str(statement.privacy["clipping"])
    if statement.config.get("clipping"):
        return words.replace("clip_norm", "the round's S", 1).replace(
            " and adapts", f", has come to {now:g} and adapts", 1
        )
    return words.replace("clip_norm", f"S = {now:g}", 1)
