"""Hugging Face transformers with peft adapters: tiny, randomly initialised, nothing is downloaded.

In one file, since importing transformers takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedblur
from fedblur.core.errors import ModelError, RunError
from fedblur.core.rng import Seeded
from fedblur.data.population import Federation, Packed, Samples
from fedblur.engines.choice import activation_bytes, choose_engine
from fedblur.learning.client import ClientJob
from fedblur.learning.model_checks import check_model, constants, for_training
from fedblur.learning.module_function import Layout, as_function, choose_trainable, initial_vector
from tests.engines.neighbours import ENGINES
from tests.worlds import CPU

TOKENS, CLASSES = 50, 3
SIZES = [9, 4, 7]


def adapted(module: nn.Module, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=targets)
    return get_peft_model(module, adapters)  # type: ignore[arg-type]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=TOKENS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    return adapted(BertForSequenceClassification(config), ["query", "value"])


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=16, num_labels=CLASSES, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return adapted(LlamaForSequenceClassification(config), ["q_proj", "v_proj"])


@cache
def clients() -> Packed:
    """Clients whose label is the residue of their first token; the ends of some samples are padding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, TOKENS, (sum(SIZES), 8), generator=generator)
    x[::3, 5:] = 0
    sizes = torch.tensor(SIZES)
    return Packed(x, x[:, 0] % CLASSES, torch.cumsum(sizes, 0) - sizes, sizes, CLASSES)


def with_masks(population: Packed) -> Packed:
    assert isinstance(population.x, Tensor)
    x = {"input_ids": population.x, "attention_mask": (population.x > 0).long()}
    return Packed(x, population.y, population.starts, population.sizes, population.classes)


def job_of(module: nn.Module, batch_size: int = 4) -> ClientJob:
    layout, local = Layout.of(module), fedblur.LocalTraining(steps=2, batch_size=batch_size, learning_rate=0.5)
    start = layout.unflatten(initial_vector(module))
    return ClientJob(as_function(for_training(module)), layout, start, local, (), 0.5)


@pytest.mark.parametrize("make", [bert, llama])
def test_adapters__agree_on_every_engine_and_follow_the_seed(make: Callable[[], nn.Module]) -> None:
    module, population = make(), clients() if make is bert else with_masks(clients())
    check_model(module, (8,), CLASSES, zeros=_two(population.x))
    before = {name: tensor.clone() for name, tensor in constants(module).items()}
    assert any("position_ids" in name or "inv_freq" in name for name in before)  # buffers that are constants
    job = job_of(module)
    assert job.layout.total < 310 < sum(tensor.numel() for tensor in before.values()) / 10
    assert all("lora_" in name or "modules_to_save" in name for name in job.layout.names)
    rows = []
    names = ["vectorised", "sequential", "workers", *(["traced"] if make is llama else []), "vectorised"]
    for engine in (ENGINES[name] for name in names):
        torch.manual_seed(len(rows))  # whatever else has drawn before
        blocks = engine(population, 32).map_clients(job, torch.arange(3), Seeded.root(0))
        rows.append(torch.cat([block.bounded.value for block in blocks]))
    for row in rows[1:]:
        torch.testing.assert_close(row, rows[0], rtol=0, atol=1e-5)
    assert torch.equal(rows[-1], rows[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in constants(module).items())


def _two(x: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    return x[:2] * 0 if isinstance(x, Tensor) else {name: tensor[:2] * 0 for name, tensor in x.items()}


def test_block__of_a_frozen_model_takes_no_more_than_its_activations_allow() -> None:
    """Adapters are tiny: by their number of parameters alone hundreds of clients would share a block."""
    module, population = bert(), clients()
    like = Samples(population.x, population.y)
    job = job_of(module, batch_size=2048)
    own = activation_bytes(job, module, like, CLASSES)
    total = job.layout.total
    assert own > 1000 * total
    engine = choose_engine(population, module, total, CPU, "vectorised", cohort=1000, activations=own)
    assert engine.block_size == max(1, 64 * 2**20 // (own + 32 * total)) == 1
    assert choose_engine(population, module, total, CPU, "vectorised", cohort=1000).block_size > 1
    choose_trainable(module, ["*"])
    assert activation_bytes(job, module, like, CLASSES) == 0


def federation() -> Federation:
    population = clients()
    return Federation("tokens", population, None, 0, Samples(population.x, population.y))


CONFIG = fedblur.Config(
    rounds=2, sample_rate=1.0, noise_multiplier=1.0, clip_norm=0.5, seed=0,
    local=fedblur.LocalTraining(steps=2, batch_size=4, learning_rate=0.5),
)  # fmt: skip


def test_train__of_adapters_is_reproducible_and_resumes(tmp_path: Path) -> None:
    module = bert()
    runs = []
    for name in ("one", "two"):
        torch.manual_seed(len(runs))
        runs.append(fedblur.train(CONFIG, module=module, federation=federation(), out=tmp_path / name))
    kept = [(run.path / "model.safetensors").read_bytes() for run in runs]
    assert kept[0] == kept[1]
    tensors = load_file(runs[0].path / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == runs[0].summary["parameters"] < 310
    unexpected = bert().load_state_dict(tensors, strict=False).unexpected_keys
    assert not unexpected  # adapters by the names that peft gives them

    def stop(row: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedblur.train(CONFIG, module=module, federation=federation(), out=tmp_path / "three", watch=stop)
    other = bert()
    with torch.no_grad():
        next(tensor for name, tensor in other.named_parameters() if "word_embeddings" in name).add_(1e-3)
    with pytest.raises(RunError, match="the frozen parameters and buffers of this model are not those that"):
        fedblur.resume(tmp_path / "three", module=other, federation=federation())
    fedblur.resume(tmp_path / "three", module=module, federation=federation())
    assert (tmp_path / "three" / "model.safetensors").read_bytes() == kept[0]


def test_train__trainable_patterns_choose_what_is_sent(tmp_path: Path) -> None:
    """The same as `requires_grad`, and resumed without being said again."""
    module = bert()
    run = fedblur.train(CONFIG, module=module, federation=federation(), out=tmp_path / "run", trainable=["*.lora_B.*"])
    assert set(load_file(run.path / "model.safetensors")) == {
        name for name, _ in module.named_parameters() if ".lora_B." in name
    }
    assert json.loads((run.path / "config.json").read_text())["own"]["trainable"] == ["*.lora_B.*"]
    assert fedblur.resume(run.path, module=module, federation=federation()).summary["parameters"] == 2 * 2 * 16 * 2
    assert any(tensor.requires_grad for name, tensor in module.named_parameters() if ".lora_A." in name)
    with pytest.raises(ModelError, match=r"trainable='lora_\*' matches no parameter"):
        fedblur.train(CONFIG, module=module, federation=federation(), out=tmp_path / "no", trainable=["lora_*"])
    assert not (tmp_path / "no").exists()


def test_train__goes_one_by_one_where_vmap_refuses_the_model(tmp_path: Path) -> None:
    """BERT looks at its mask's values, to skip it where nothing is padding."""
    population = with_masks(clients())
    masked = Federation("masked", population, None, 0, Samples(population.x, population.y))
    run = fedblur.train(CONFIG, module=bert(), federation=masked, out=tmp_path / "run")
    assert "sequential" in str(run.record.machine)
    assert "vectorised cannot run this model: it branches on a tensor's values" in str(run.record.machine)
    machine = fedblur.Machine(engine="vectorised")
    with pytest.raises(ModelError, match="engine='vectorised' cannot run this model .*; use --engine sequential"):
        fedblur.train(CONFIG, module=bert(), federation=masked, out=tmp_path / "no", machine=machine)


def test_train__a_private_run_of_adapters_is_checked_for_isolation(tmp_path: Path) -> None:
    private = fedblur.Config(
        rounds=1, sample_rate=1.0, noise_multiplier=1.0, clip_norm=0.5,
        local=fedblur.LocalTraining(steps=1, batch_size=4, learning_rate=0.5),
    )  # fmt: skip
    machine = fedblur.Machine(engine="vectorised")  # which stops where one client's last bits depend on others
    run = fedblur.train(private, module=llama(), federation=federation(), out=tmp_path / "run", machine=machine)
    assert "vectorised" in str(run.record.machine)


@pytest.mark.long
def test_memory__grows_with_the_adapters_alone() -> None:
    command = [sys.executable, "benchmarks/adapters_memory.py"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
