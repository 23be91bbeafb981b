"""Nothing of accel/ is needed for a correct result: with FEDBLUR_ACCEL=off the model is the same to float tolerance."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedblur
from fedblur.core.errors import ConfigError
from fedblur.core.switches import SWITCHES, switched_on

TRAIN = """
import json, sys
from pathlib import Path
import fedblur
import fedblur.engines.choice
fedblur.engines.choice._TRACED = 200  # steps of a run from which it is traced
for name, settings in json.loads(sys.argv[1]).items():
    settings["local"] = fedblur.LocalTraining(**settings["local"])
    out = Path(sys.argv[2]) / name
    fedblur.train(fedblur.Config(**settings), out=out, machine=fedblur.Machine(device="cpu"))
    loaded = [name for name in sys.modules if name.startswith("fedblur.accel")]
    (out / "loaded.json").write_text(json.dumps(loaded))
"""
SMALL = {"dataset": "digits", "clients": 20, "sample_rate": 0.3, "seed": 7, "epsilon": 8.0}
WORLDS = {
    "workers": {**SMALL, "model": "cnn", "method": "augment", "rounds": 2, "local": {"steps": 3, "batch_size": 8}},
    "traced": {**SMALL, "model": "mlp", "method": "blur+lus", "rounds": 8, "local": {"steps": 25, "batch_size": 8}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in all worlds, in a process with what makes it fast and in one without."""
    folder = tmp_path_factory.mktemp("trained")
    for accel in ("on", "off"):
        environment = {**os.environ, "FEDBLUR_ACCEL": accel, "FEDBLUR_TIMING": "off", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", TRAIN, json.dumps(WORLDS), str(folder / accel)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("world", WORLDS)
def test_accel_off__the_model_is_the_same_and_no_module_of_accel_is_loaded(world: str, trained: Path) -> None:
    used, unused = (json.loads((trained / accel / world / "loaded.json").read_text()) for accel in ("on", "off"))
    assert unused == []
    assert f"fedblur.accel.{'replay' if world == 'traced' else 'kernels.cpu_layers'}" in used
    assert world == "traced" or "fedblur.accel.replay" not in used
    fast, plain = (load_file(trained / accel / world / "model.safetensors") for accel in ("on", "off"))
    assert fast.keys() == plain.keys()
    for name, tensor in fast.items():
        torch.testing.assert_close(plain[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("switch", SWITCHES)
def test_switch__says_on_or_off_and_anything_else_is_refused_by_name(
    switch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for value, on in (("on", True), ("off", False), ("", True)):
        monkeypatch.setenv(switch, value)
        assert switched_on(switch) == on
    monkeypatch.setenv(switch, "0")
    with pytest.raises(ConfigError, match=f"{switch}='0' must be on or off"):
        fedblur.train(fedblur.Config(rounds=1), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
