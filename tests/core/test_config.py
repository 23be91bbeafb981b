"""The configuration: fields are the schema, unknown keys name the nearest, everything survives a round trip."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedblur.core.config import (
    Config,
    LocalTraining,
    apply_overrides,
    canonical,
    config_hash,
    differences,
    from_dict,
    read_toml,
    to_dict,
)
from fedblur.core.errors import ConfigError
from fedblur.core.registry import parts, register


def test_config__round_trip_through_json() -> None:
    config = from_dict(
        {
            "model": {"name": "cnn", "variant": "a"},
            "method": [{"name": "blur", "strength": math.inf}, "lus"],
            "epsilon": math.inf,
            "local": {"steps": 3},
        }
    )
    again = from_dict(json.loads(canonical(to_dict(config))))
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_config__hash_changes_with_every_setting() -> None:
    base = config_hash(Config())
    for change in (
        {"epsilon": 3.0},
        {"method": "blur"},
        {"seed": 1},
        {"local": {"steps": 11}},
        {"data_seed": 1},
    ):
        assert config_hash(from_dict(change)) != base


@pytest.mark.parametrize(
    ("schema", "named", "message"),
    [
        (Config, {"evaluate_every": 3}, "unknown key 'evaluate_every': did you mean 'eval_every'?"),
        (LocalTraining, {"step": 1}, "unknown key 'step': did you mean 'steps'?"),
    ],
)
def test_python__a_misspelt_setting_names_the_nearest_one(schema: type, named: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        schema(**named)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sample_rat": 0.1}, "unknown key 'sample_rat': did you mean 'sample_rate'?"),
        ({"local": {"step": 1}}, "unknown key 'local.step': did you mean 'steps'?"),
        (
            {"method": [{"name": "blur", "strenth": 1}]},
            "unknown key 'method.blur.strenth': did you mean 'strength'?",
        ),
        ({"method": "blurr"}, "method 'blurr' is unknown: did you mean 'blur'?"),
        ({"model": "resnet"}, "model 'resnet' is unknown: did you mean 'resnet18'?"),
        ({"rounds": "many"}, "rounds='many': input should be a valid integer"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"sample_rate": 1.3}, "sample_rate=1.3 must be in (0, 1]"),
        ({"sample_rate": 0}, "sample_rate=0.0 must be in (0, 1]"),
        ({"epsilon": -1}, "epsilon=-1.0 must be above 0"),
        ({"epsilon": 2, "noise_multiplier": 1}, "both given"),
        ({"delta": 1.5}, "delta=1.5 must be in (0, 1)"),
        ({"clip_norm": 0}, "clip_norm=0.0 must be above 0"),
        ({"clip_norm": math.inf}, "clip_norm=inf needs epsilon=inf"),
        ({"method": [{"name": "lus", "sparsity": 1.0}]}, "sparsity=1.0 must be in [0, 1)"),
        ({"evaluate": "validation", "validation_share": 0.0}, "needs validation_share above 0"),
        ({"model": 3}, "model=3 must be a name or a table with a name"),
    ],
)
def test_config__bad_values_are_one_line_that_names_them(table, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(table)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides__reach_into_parts() -> None:
    table = apply_overrides(
        {"method": "blur+lus", "model": "cnn"},
        [
            "method.blur.strength=0.8",
            "method.lus.scope=global",
            "model.variant=a",
            "local.steps=3",
            "server.learning_rate=2",
        ],
    )
    config = from_dict(table)
    assert config.method[0].strength == 0.8
    assert config.method[1].scope == "global"
    assert config.model.variant == "a"
    assert config.local.steps == 3
    assert config.server.learning_rate == 2


@pytest.mark.parametrize("bad", ["clip_norm", "=3", "method.blur.strength=1"])
def test_overrides__that_cannot_be_applied_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_overrides({}, [bad])


def test_differences__names_every_changed_key() -> None:
    old, new = to_dict(Config()), to_dict(from_dict({"rounds": 7, "local": {"steps": 2}}))
    assert differences(old, new) == ["local.steps: 10 -> 2", "rounds: 100 -> 7"]


def test_method__dp_fedavg_is_the_empty_list() -> None:
    assert from_dict({"method": "dp-fedavg"}).method == from_dict({"method": []}).method == ()


def test_register__a_part_must_be_a_dataclass_with_a_name_of_its_own() -> None:
    with pytest.raises(TypeError, match="frozen dataclass"):
        register("method", "plain")(type("Plain", (), {}))

    @dataclass(frozen=True)
    class Impostor:
        pass

    assert "blur" in parts("method")
    with pytest.raises(ValueError, match="two parts want to be method 'blur'"):
        register("method", "blur")(Impostor)


def test_config__parsing_a_methods_name_imports_neither_engines_nor_the_training_loop() -> None:
    code = (
        "import sys, fedblur\n"
        "for name in ('blur+lus', 'dp-fedavg', 'ae-dpfl', 'knn-dpfl'):\n"
        "    config = fedblur.Config(method=name)\n"
        "unwanted = ('training.loop', 'training.setup', 'experiments', 'voting.protocol', 'engines', 'accel')\n"
        "print([name for name in sys.modules if name.removeprefix('fedblur.').startswith(unwanted)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_toml__a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.touch()
    os.truncate(path, 2**26 + 1)  # without content: it takes no room on the disk
    with pytest.raises(ConfigError, match="is larger than 64 MiB"):
        read_toml(path)
