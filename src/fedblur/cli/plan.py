"""`fedblur plan`: noise, epsilon and what to expect, before anyone trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedblur.cli.options import Json, complete, complete_recipe
from fedblur.cli.output import print_json
from fedblur.core.errors import ConfigError
from fedblur.core.registry import build
from fedblur.privacy.accounting import ACCOUNTANTS
from fedblur.privacy.planning import PAPER_CNN, Outlook, Setting, outlook

if TYPE_CHECKING:
    from fedblur.experiments.recipe import Recipe
    from fedblur.training.noise_comparison import Comparison

CORRELATED = ("tree", "banded", "blt")  # kinds of noise that hang together over rounds


def plan(
    clients: Annotated[int | None, typer.Option(help="N, the number of training clients.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="p, the probability that a client joins a round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="T, rounds of training.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy target; the noise follows from it.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ; epsilon follows from it.")] = None,
    delta: Annotated[str, typer.Option(help='A number, "1/N" or "N^-1.1".')] = "1/N",
    sampling: Annotated[
        str, typer.Option(help="poisson, fixed or full.", autocompletion=complete("sampling"))
    ] = "poisson",
    parameters: Annotated[
        int | None, typer.Option(help=f"d, the model's size [default: {PAPER_CNN}, the paper's CNN].")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model by name, with --shape and --classes, instead of --parameters.",
            autocompletion=complete("model"),
        ),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Shape of a sample, for --model or --recipe: 1,28,28.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes, for --model or --recipe.")] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="S; it scales the noise, not the signal-to-noise ratio [default: 0.1].")
    ] = None,
    mechanism: Annotated[
        str,
        typer.Option(
            help="gaussian, ddgauss or skellam; tree, banded or blt with --min-separation.",
            autocompletion=complete("mechanism"),
        ),
    ] = "gaussian",
    min_separation: Annotated[
        int | None,
        typer.Option(help="b: a client takes part again after b rounds at the earliest. Compares correlated noise."),
    ] = None,
    at_most: Annotated[
        int, typer.Option(help="For --min-separation: how often a client takes part; 0: as often as it allows.")
    ] = 0,
    server: Annotated[
        str,
        typer.Option(
            help="For --min-separation: the server's optimiser, which says how rounds add up to the model.",
            autocompletion=complete("server"),
        ),
    ] = "sgd",
    bits: Annotated[int | None, typer.Option(help="For a discrete mechanism: sums are modulo 2^bits.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help='"best": choose all settings that are not given, and explain them.', autocompletion=complete_recipe
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Data set for --recipe, instead of --shape and --classes.", autocompletion=complete("dataset")
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw epsilon over rounds and R over sample rates into this file; with --min-separation the "
            "noise in the models."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Find the noise for an epsilon, or the epsilon for a noise level, and what to expect. No data are needed.

    With --recipe best it also chooses all settings, from public figures, and explains each. With --min-separation it
    compares correlated noise with independent noise at the same epsilon: what each leaves in the model, and what it
    assumes of whom.

    Example: `fedblur plan --clients 3400 --sample-rate 0.04 --rounds 1000 --epsilon 2`
    """
    table = {
        "clients": clients, "sample_rate": sample_rate, "rounds": rounds, "epsilon": epsilon,
        "noise_multiplier": noise_multiplier, "delta": delta, "sampling": sampling, "clip_norm": clip_norm,
    }  # fmt: skip
    if min_separation is not None or mechanism in CORRELATED:
        compare_noise(table, mechanism, min_separation, at_most, server, recipe, plot, json_)
        return
    if at_most or server != "sgd":
        raise ConfigError("--at-most and --server are for --min-separation; add it, or leave them out")
    chosen = None
    if recipe is None and dataset is not None:
        raise ConfigError(
            f"--dataset={dataset} is for --recipe; without it give the model's size: --parameters or --model"
        )
    if recipe is not None:
        chosen = choose_recipe(
            {**table, "recipe": recipe, "dataset": dataset, "model": model}, shape, classes, parameters
        )
        table |= {"clients": chosen.clients, **{key: chosen.settings[key] for key in table if key in chosen.settings}}
    size = model_size(model, shape, classes, parameters) if chosen is None else chosen.parameters
    noise = {"name": mechanism} | ({} if bits is None else {"bits": bits})
    answer = outlook(make_setting(table, size, noise))
    if plot is not None:
        from fedblur.report.plots import plot_outlook  # matplotlib is slow to import

        plot_outlook(answer, plot)
    if json_:
        explained = {} if chosen is None else {"recipe": {"settings": chosen.settings, "why": chosen.lines}}
        print_json(answer.as_dict() | explained)
        return
    console = Console()
    for line in [] if chosen is None else chosen.lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    show(answer, console)


def compare_noise(
    table: dict[str, Any], mechanism: str, separation: int | None, at_most: int, server: str, recipe: str | None,
    plot: Path | None, json_: bool,
) -> None:  # fmt: skip
    """Print what kinds of noise leave in the model at one epsilon, about one of them or about all."""
    if separation is None:
        raise ConfigError(
            f"--mechanism {mechanism}: what correlated noise costs depends on how soon a client may take part again; "
            "give --min-separation, for instance 20"
        )
    if mechanism not in (*CORRELATED, "gaussian"):
        raise ConfigError(
            f"--mechanism {mechanism} does not go with --min-separation: its noise has no bound there; use tree, "
            "banded, blt or gaussian"
        )
    if recipe is not None or table["sampling"] != "poisson":
        what = "--recipe" if recipe is not None else f"--sampling {table['sampling']}"
        raise ConfigError(f"{what} does not go with --min-separation, which says who takes part; leave one of them out")
    if table["epsilon"] is None or table["noise_multiplier"] is not None:
        raise ConfigError("--min-separation compares kinds of noise at one epsilon; give --epsilon and no σ")
    demand_basics(table)
    from fedblur.training.noise_comparison import SEPARATED, Question, compare  # with torch, which no other plan needs

    asked: dict[str, Any] = {"separation": separation, "at_most": at_most, "server": server}
    taken = ("clients", "sample_rate", "rounds", "epsilon", "delta", "clip_norm")
    question = Question(**{key: table[key] for key in taken if table[key] is not None}, **asked)
    answer = compare(question)
    name = SEPARATED if mechanism == "gaussian" else mechanism
    if plot is not None:
        from fedblur.report.plots import plot_noise

        plot_noise(answer, plot)
    if json_:
        print_json(answer.as_dict(name))
    else:
        show_noise(answer, name, Console())


def show_noise(answer: Comparison, name: str, console: Console) -> None:
    """Print a table of all kinds of noise, what each assumes, and a recommendation."""
    question = answer.question
    console.print(
        f"{question.clients:,} clients, {answer.cohort:,.5g} of them a round and each at least {question.separation} "
        f"rounds apart, {question.rounds:,} rounds, ε = {question.epsilon:g}, δ = {answer.delta:.3g}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    table = Table("noise", "σ", "sensitivity", "in the final model", "in all models", "vectors kept")
    for each in answer.choices:
        mark = " *" if each.name == name else ""
        sensitivity = "–" if each.sensitivity is None else f"{each.sensitivity:.4g}"
        figures = (f"{each.noise_multiplier:.4g}", sensitivity, f"{each.final_noise:.4g}", f"{each.models_noise:.4g}")
        table.add_row(f"{each.name}{mark}", *figures, str(each.memory))
    console.print(table)
    console.print(
        f"Standard deviation of each coordinate, for S = {question.clip_norm:g} and server {question.server}.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for assumption in dict.fromkeys(each.assumes for each in answer.choices):
        names = "; ".join(each.name for each in answer.choices if each.assumes == assumption)
        console.print(f"Assumed for {names}: {assumption}.", highlight=False, markup=False, soft_wrap=True)
    for line in answer.recommendation:
        console.print(f"• {line}", highlight=False, markup=False, soft_wrap=True)


def choose_recipe(table: dict[str, Any], shape: str | None, classes: int | None, parameters: int | None) -> Recipe:
    """Choose the recipe for what was given on the command line."""
    from fedblur.experiments.recipe import choose  # with the data sets and torch, which no other plan needs

    given = {key: value for key, value in table.items() if value is not None}
    if parameters is not None:
        raise ConfigError(f"--parameters={parameters}: --recipe chooses the model; give --model to choose it yourself")
    if (shape is None) != (classes is None) or (shape is None) == (table["dataset"] is None):
        raise ConfigError("--recipe needs --dataset, or --shape and --classes: --shape 1,28,28 --classes 62")
    if shape is None or classes is None:
        return choose(given)
    if "clients" not in given:
        raise ConfigError("--recipe with --shape needs --clients, the number of clients in training")
    return choose(given, (sides(shape), classes))


def make_setting(table: dict[str, Any], parameters: int, mechanism: dict[str, Any]) -> Setting:
    """Return the setting to plan; options without a default are required."""
    demand_basics(table)
    given = {key: value for key, value in table.items() if value is not None}
    return Setting(**given, parameters=parameters, mechanism=mechanism)


def demand_basics(table: dict[str, Any]) -> None:
    """Refuse a plan without its options that have no default."""
    missing = next((key for key in ("clients", "sample_rate", "rounds") if table[key] is None), None)
    if missing is not None:
        recipe = "" if missing == "clients" else " (or --recipe best with --dataset, which chooses it)"
        raise ConfigError(
            f"--{missing.replace('_', '-')} is missing{recipe}; for instance: "
            "fedblur plan --clients 3400 --sample-rate 0.04 --rounds 1000 --epsilon 2"
        )


def model_size(model: str | None, shape: str | None, classes: int | None, parameters: int | None) -> int:
    """Return d, as given or as the named model has it."""
    if model is None:
        if shape is not None or classes is not None:
            raise ConfigError("--shape and --classes describe the data of --model; add it, or give --parameters")
        return PAPER_CNN if parameters is None else parameters
    if parameters is not None:
        raise ConfigError(f"--parameters={parameters} and --model={model} both give the model's size; keep one")
    if shape is None or classes is None:
        raise ConfigError(f"--model={model} needs --shape and --classes, for instance --shape 1,28,28 --classes 62")
    module = build("model", model).build(sides(shape), classes)
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad)


def sides(shape: str) -> tuple[int, ...]:
    """Parse `1,28,28` as numbers."""
    try:
        return tuple(int(side) for side in shape.split(","))
    except ValueError:
        raise ConfigError(f"--shape={shape} must be whole numbers with commas, for instance 1,28,28") from None


def show(answer: Outlook, console: Console) -> None:
    """Print a table of both accountants, then advice."""
    setting, plan = answer.setting, answer.tightest
    cohort = f"{plan.expected_cohort:,.5g} ± {plan.sampler.cohort_spread:.3g} clients a round"
    console.print(f"{plan.sampler.description}: {cohort}", highlight=False)
    console.print(f"{setting.rounds:,} rounds, δ = {plan.delta:.3g}, {plan.adjacency}", highlight=False, soft_wrap=True)
    noise = f"{setting.mechanism.part_name} noise"
    console.print(f"{setting.parameters:,} parameters, S = {setting.clip_norm:g}, {noise}", highlight=False)
    table = Table("", *(name.upper() for name in ACCOUNTANTS))
    rows: dict[str, list[str]] = {"ε": [], "noise multiplier σ": [], "noise std σS": []}
    rows |= {"noise norm per round": [], "  over S, the longest signal": [], "signal-to-noise R": []}
    for name in ACCOUNTANTS:
        found = answer.plans.get(name)
        sigma = math.nan if found is None else found.noise_multiplier
        norm = sigma * math.sqrt(setting.parameters) / plan.expected_cohort  # over S
        ratio = math.nan if found is None else answer.signal_to_noise(name)
        target = math.nan if found is None else found.epsilon_target
        clip = setting.clip_norm
        for cells, value in zip(rows.values(), (target, sigma, sigma * clip, norm * clip, norm, ratio)):
            cells.append("–" if math.isnan(value) else f"{value:.4g}")
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console.print(table)
    for line in answer.advice:
        console.print(f"• {line}", highlight=False, markup=False, soft_wrap=True)
