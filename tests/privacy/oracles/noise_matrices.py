"""Figures of jax-privacy for our noise matrices: sensitivities, errors, and how good its own optimised matrices are.

    python -m venv oracle && oracle/bin/pip install jax-privacy==2.0.0
    oracle/bin/python tests/privacy/oracles/noise_matrices.py > tests/privacy/oracles/noise_matrices.json

test_noise_matrices_oracle.py compares. This script imports nothing of FedBlur: a matrix is written down here again.
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting.rdp import RdpAccountant
from jax_privacy.matrix_factorization import buffered_toeplitz, dense, sensitivity, toeplitz

jax.config.update("jax_enable_x64", True)

UNIT = 2**20
FALLING = [int(UNIT * x) for x in np.cumprod([(2 * k - 1) / (2 * k) for k in range(1, 60)])]
SIGNED = [3 * UNIT // 2, -UNIT // 3, UNIT // 7, UNIT]
BUFFERS = {"decays": [1046000, 985000, 600000], "weights": [70000, 300000, 270000]}
SEPARATED = [(1, None), (1, 3), (7, None), (20, 4), (20, None), (33, 2), (150, None)]
MOMENTUM = 0.9


def momentum(rounds: int) -> np.ndarray:
    """Sums over rounds of moving sums: what a server with momentum makes of its means."""
    return (1 - MOMENTUM ** np.arange(1, rounds + 1)) / (1 - MOMENTUM)


def errors(inverse: Any, rounds: int) -> dict[str, list[float]]:
    """Return the mean and the last squared error of plain sums and of momentum, for the inverse's coefficients."""
    found = {}
    for name, workload in (("sums", np.ones(rounds)), ("momentum", momentum(rounds))):
        each = toeplitz.per_query_error(noising_coef=inverse, n=rounds, workload_coef=jnp.asarray(workload))
        found[name] = [float(each.mean()), float(each[-1])]
    return found


def separated(column: Any, rounds: int) -> list[list[Any]]:
    rows = []
    for apart, at_most in SEPARATED:
        if apart <= rounds:
            squared = toeplitz.minsep_sensitivity_squared(column, apart, at_most, n=rounds)
            rows.append([apart, at_most, float(squared) ** 0.5])
    return rows


def in_turn(matrix: Any) -> list[list[Any]]:
    rounds = matrix.shape[0]
    return [
        [groups, float(sensitivity.fixed_epoch_sensitivity(matrix, rounds // groups))]
        for groups in (1, 5, 8, 20, 40)
        if rounds % groups == 0
    ]


def banded(coefficients: list[int], rounds: int) -> dict[str, Any]:
    column = jnp.asarray([UNIT, *coefficients][:rounds], dtype=jnp.float64) / UNIT
    matrix = toeplitz.materialize_lower_triangular(column, rounds)
    if min(coefficients) >= 0:
        rows, turns = separated(column, rounds), in_turn(matrix)
    else:
        pairs = [(apart, at_most) for apart, at_most in SEPARATED if len(column) <= apart <= rounds]
        rows = [[*pair, sensitivity.get_sensitivity_banded(matrix, *pair)] for pair in pairs]
        turns = [turn for turn in in_turn(matrix) if turn[0] >= len(column)]
    error = errors(toeplitz.inverse_coef(column, rounds), rounds)
    return {"coefficients": coefficients, "rounds": rounds, "separated": rows, "in_turn": turns, "errors": error}


def buffered(rounds: int) -> dict[str, Any]:
    decays, weights = (np.array(BUFFERS[name]) / UNIT for name in ("decays", "weights"))
    blt = buffered_toeplitz.BufferedToeplitz.build(decays, weights)
    column = blt.toeplitz_coefs(rounds)
    error = errors(blt.inverse().toeplitz_coefs(rounds), rounds)
    turns = in_turn(toeplitz.materialize_lower_triangular(column, rounds))
    return {**BUFFERS, "rounds": rounds, "separated": separated(column, rounds), "in_turn": turns, "errors": error}


def nodes(first: int, last: int, second: bool) -> list[tuple[int, int]]:
    """Return the nodes of a binary tree over rounds, without those that are second children, by their ends."""
    own = [] if second else [(first, last)]
    if first == last:
        return own
    middle = (first + last) // 2
    return own + nodes(first, middle, False) + nodes(middle + 1, last, True)


def tree(restart: int, rounds: int) -> dict[str, Any]:
    """Sensitivity for any rounds at least `apart` is a bound here; for one round and for groups in turn it is exact."""
    spans = [span for start in range(0, rounds, restart) for span in nodes(start, start + restart - 1, False)]
    rows = sorted((last, first) for first, last in spans if last < rounds)
    ends = np.arange(rounds)
    matrix = jnp.asarray([(ends >= first) & (ends <= last) for last, first in rows], dtype=jnp.float64)
    pairs = [pair for pair in SEPARATED if pair[0] <= rounds]
    bounds = [[*pair, sensitivity.get_min_sep_sensitivity_upper_bound(matrix, *pair)] for pair in pairs]
    error = {}
    for name, workload in (("sums", np.ones(rounds)), ("momentum", momentum(rounds))):
        sums = toeplitz.materialize_lower_triangular(jnp.asarray(workload), rounds)
        each = dense.per_query_error(strategy_matrix=matrix, workload_matrix=sums)
        error[name] = [float(each.mean()), float(each[-1])]
    single = float(sensitivity.single_participation_sensitivity(matrix))
    figures = {"single": single, "bounds": bounds, "in_turn": in_turn(matrix), "errors": error}
    return {"restart": restart, "rounds": rounds, **figures}


def tree_by_accountant(rounds: int) -> list[float]:
    """Return rounds, and the squared sensitivity that dp_accounting's event of one participation stands for."""
    orders, neighbours = [8.0], dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    tree = RdpAccountant(orders, neighbours).compose(dp_accounting.SingleEpochTreeAggregationDpEvent(10.0, [rounds]))
    one = RdpAccountant(orders, neighbours).compose(dp_accounting.GaussianDpEvent(10.0))
    delta = 1e-300
    conversion = np.log(1 / 8 / delta) / 7 + np.log1p(-1 / 8)  # what an epsilon adds to the divergence of order 8
    return [rounds, float((tree.get_epsilon(delta) - conversion) / (one.get_epsilon(delta) - conversion))]


def optimised(rounds: int, apart: int) -> dict[str, Any]:
    """Return the root of mean error × squared sensitivity, for plain sums, of the matrices that jax-privacy finds."""
    column = toeplitz.optimize_banded_toeplitz(rounds, apart)
    once = float(toeplitz.loss(column, rounds)) ** 0.5
    blt = buffered_toeplitz.optimize(n=rounds, min_sep=apart, max_participations=None, error="mean", max_buffers=4)
    many = buffered_toeplitz.LossFn.build_min_sep(n=rounds, error="mean", min_sep=apart, max_participations=None)
    found = [float(many.loss(blt)) ** 0.5, *blt.buf_decay.tolist(), *blt.output_scale.tolist()]
    return {"rounds": rounds, "separation": apart, "banded, one participation": once, "blt, all": found}


def main() -> None:
    figures = {
        "jax-privacy": importlib.metadata.version("jax-privacy"),
        "dp_accounting": importlib.metadata.version("dp_accounting"),
        "banded": [banded(c, t) for c in (FALLING[:4], FALLING, [UNIT] * 9, SIGNED) for t in (40, 101)],
        "blt": [buffered(t) for t in (40, 101, 1000)],
        "tree": [tree(r, t) for r in (1, 8, 64) for t in (40, 100)],
        "tree, one participation": [tree_by_accountant(t) for t in (8, 100, 2000)],
        "optimised": [optimised(100, 10), optimised(400, 40)],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
