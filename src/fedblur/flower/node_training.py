"""A node's training: the client code of the simulator, on this node's data, with this node's own randomness.

In: the question's model, clip norm and support. Out: raw bytes of the clipped update (`central`), or residues of the
update with its share of the noise (`secure-sum`). In a run without a seed all randomness is the node's own, from its
operating system; a seeded run follows the simulator's streams by the client's index, and is NOT PRIVATE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedblur.core.config import Config
from fedblur.core.errors import DataError
from fedblur.core.rng import make_rng
from fedblur.data.federation import own_samples
from fedblur.data.population import Federation, Packed
from fedblur.flower.masking import Residues
from fedblur.flower.node_state import NodeRows, state_folder
from fedblur.flower.settings import Deployment
from fedblur.flower.wire import Refused
from fedblur.learning.batches import plan_work
from fedblur.learning.client import ClientJob, train_block
from fedblur.learning.model_checks import constants_digest, for_training
from fedblur.learning.models import make_model
from fedblur.learning.module_function import as_function
from fedblur.learning.personal import FirstRows, Personal, shared_layout
from fedblur.privacy.clipping import Bounded, Message
from fedblur.privacy.mechanisms.base import Release, mechanism_for
from fedblur.privacy.mechanisms.secure_sum import SecureSum
from fedblur.training.checks import check_targets, check_task
from fedblur.training.setup import as_read_by, check_reading, plan_for, width_of

_CPU = torch.device("cpu")
_ROUNDING = 1e-9  # of an epsilon, between this processor's arithmetic and the server's


def update(
    deployment: Deployment, node: Mapping[str, Any], node_id: int, round_: int, told: Mapping[str, Any],
    arrays: Mapping[str, bytes],
) -> bytes:  # fmt: skip
    """Return the clipped message of this node's client, as float32."""
    _, _, bounded = _trained(deployment, node, node_id, round_, told, arrays)
    return bounded.value[0].numpy().astype("<f4").tobytes()


def noisy(
    deployment: Deployment,
    node: Mapping[str, Any],
    node_id: int,
    round_: int,
    told: Mapping[str, Any],
    arrays: Mapping[str, bytes],
    number: int,
) -> tuple[Residues, int]:
    """Return the message rotated, rounded and with its share of the noise, modulo 2^b; and b."""
    config, job, bounded = _trained(deployment, node, node_id, round_, told, arrays)
    mechanism = mechanism_for(config, config.sampling.sampler(config.clients, config.sample_rate), job.layout.total)
    if not isinstance(mechanism, SecureSum) or mechanism.part.mode != "exact" or mechanism.part.min_cohort is None:
        raise Refused("the configuration's mechanism gives this node no share of the noise")
    width, bound = job.message.width(job.layout.total), job.message.l2_bound(job.clip_norm)
    release = Release(width, bound, told["noise_multiplier"], mechanism.part.min_cohort, _CPU, round_)
    rng = make_rng(config.seed).child("round", round_)
    whole = mechanism.encode(bounded, range(number, number + 1), release, rng)[0]
    modulus = 2**mechanism.part.bits
    return torch.remainder(whole, modulus).numpy().astype(np.uint32), mechanism.part.bits


def _trained(
    deployment: Deployment, node: Mapping[str, Any], node_id: int, round_: int, told: Mapping[str, Any],
    arrays: Mapping[str, bytes],
) -> tuple[Config, ClientJob, Bounded]:  # fmt: skip
    config = deployment.configuration()
    _demand_told(config, round_, told)
    own = own_population(deployment, node)
    job, data = _job(deployment, config, told, arrays, own)
    _demand_noise(config, told["noise_multiplier"], job.layout.total)
    me = torch.tensor([0])
    shard = data.train.fetch(me)
    name = torch.tensor([told["client"]])  # names this client's random streams in a seeded run
    rng = make_rng(config.seed).child("round", round_)
    work = plan_work(shard, name, config.local.steps, config.local.batch_size, rng, _CPU)
    if job.personal is None:
        return config, job, train_block(job, shard, work, vectorise=False).bounded
    folder = state_folder(node, node_id, config)
    rows = NodeRows(folder, job.personal, round_, config.checkpoint_every)
    block = train_block(job, shard, replace(work, personal=rows.read(me)), vectorise=False)
    assert block.personal is not None
    rows.write(me, block.personal)  # on disk before the reply: what leaves is the bounded message alone
    return config, job, block.bounded


def demand_distance(deployment: Deployment, round_: int, last: int) -> None:
    """Refuse to take part sooner after round `last` than the sampling says: a node counts its own rounds too."""
    distance = getattr(deployment.configuration().sampling, "separation", 1)
    if last and round_ < last + distance:
        raise Refused(f"round {round_} comes too early: this node took part in round {last}, and waits {distance}")


def _demand_told(config: Config, round_: int, told: Mapping[str, Any]) -> None:
    """Refuse a question that disagrees with this node's own configuration."""
    sigma, clip_norm = told["noise_multiplier"], told["clip_norm"]
    if round_ > config.rounds:
        raise Refused(f"round {round_} is beyond the {config.rounds} that were planned")
    if config.clipping is None and (clip_norm, told["bit_weight"]) != (config.clip_norm, 0.0):
        raise Refused(f"clip_norm={clip_norm} is not the configuration's {config.clip_norm}")
    if config.clipping is not None and not 0 < clip_norm <= config.clipping.largest(config.clip_norm):
        raise Refused(
            f"clip_norm={clip_norm} is beyond {config.clipping.largest(config.clip_norm)}, as far as it adapts"
        )
    if config.noise_multiplier is not None and sigma != config.noise_multiplier:
        raise Refused(f"noise_multiplier={sigma} is not the configuration's {config.noise_multiplier}")


def _demand_noise(config: Config, sigma: float, parameters: int) -> None:
    """Refuse noise with which the planned rounds would cost more than the configuration's epsilon."""
    if config.epsilon is None or math.isinf(config.epsilon):
        return
    if not 0 < sigma < math.inf:
        raise Refused(f"noise_multiplier={sigma} cannot give epsilon={config.epsilon}")
    assert config.clients is not None
    told = plan_for(replace(config, epsilon=None, noise_multiplier=sigma), config.clients, parameters)
    if not told.epsilon_target <= config.epsilon * (1 + _ROUNDING):
        least = plan_for(config, config.clients, parameters).noise_multiplier
        raise Refused(
            f"noise_multiplier={sigma} is below {least:.6g}, which epsilon={config.epsilon} needs for the "
            f"{config.rounds} planned rounds"
        )


def own_population(deployment: Deployment, node: Mapping[str, Any]) -> Packed:
    """Return this node's samples, as a population of one."""
    samples = own_samples("client_data's ", *deployment.client_data(node))
    inputs, wanted = samples.x, deployment.shape
    if isinstance(inputs, dict):
        found: Any = {name: tuple(x.shape[1:]) for name, x in inputs.items()}
        asked: Any = {name: tuple(shape) for name, shape in wanted.items()} if isinstance(wanted, Mapping) else wanted
    else:
        found, asked = tuple(inputs.shape[1:]), wanted if isinstance(wanted, Mapping) else tuple(wanted)
    if found != asked:
        raise DataError(f"client_data gives samples of shape {found}, not {asked}")
    return Packed(samples.x, samples.y, torch.tensor([0]), torch.tensor([len(samples)]), deployment.classes)


def _job(
    deployment: Deployment, config: Config, told: Mapping[str, Any], arrays: Mapping[str, bytes], own: Packed
) -> tuple[ClientJob, Federation]:
    """Return what this node's client is asked to do, and its data as the model reads them."""
    data = Federation("a node's own", own, None, 0, own.samples())
    check_targets(config, data)
    module = (
        deployment.module()
        if deployment.module
        else make_model(config.model, own.shape, width_of(config.task, data), 0)
    )
    data = as_read_by(module, data)
    check_task(config, data, check_reading(module, config.task, data))
    if told["constants"] != constants_digest(module):
        raise Refused("the model's frozen parameters and buffers are not the server's: all need the same weights")
    layout = shared_layout(module, config.personal)
    start = _vector(arrays["start"], "<f4")
    if len(start) != layout.total:
        raise Refused(f"a model of {len(start)} parameters came for one of {layout.total}")
    personal = Personal.of(module, layout, config.method)
    if personal is not None:
        first = _vector(arrays.get("personal", b""), "<f4")
        if len(first) != personal.layout.total or not bool(torch.isfinite(first).all()):
            raise Refused(f"{len(first)} personal parameters came for {personal.layout.total}, or not all are finite")
        personal = replace(personal, initial=first, rows=FirstRows(first))
    support = _vector(arrays["support"], "<i8") if "support" in arrays else None
    message = Message(config.bounding, support, told["bit_weight"])
    job = ClientJob(
        as_function(for_training(module)),
        layout,
        layout.unflatten(start),
        config.local,
        config.method,
        told["clip_norm"],
        message,
        config.task,
        personal,
    )
    return job, data


def _vector(data: bytes, kind: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=kind).astype(kind[1:]))
