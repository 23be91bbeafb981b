"""Nothing of accel/ is needed for a correct result: with FEDBLUR_ACCEL=off the model is the same to float tolerance."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

TRAIN = """
import json, sys
import fedblur
settings = json.loads(sys.argv[1])
settings["local"] = fedblur.LocalTraining(**settings["local"])
run = fedblur.train(fedblur.Config(**settings), out=sys.argv[2], machine=fedblur.Machine(device="cpu"))
print(json.dumps({"loaded": sorted(name for name in sys.modules if name.startswith("fedblur.accel"))}))
"""
SMALL = {"dataset": "digits", "clients": 20, "sample_rate": 0.3, "seed": 7, "epsilon": 8.0}
WORLDS = {
    "traced": {"model": "mlp", "method": "blur+lus", "rounds": 40, "local": {"steps": 25, "batch_size": 8}},
    "workers": {"model": "cnn", "method": "augment", "rounds": 2, "local": {"steps": 3, "batch_size": 8}},
}


def trained(settings: dict[str, object], out: Path, accel: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train in a process of its own; return the model and which modules of accel/ were loaded."""
    environment = {**os.environ, "FEDBLUR_ACCEL": accel, "FEDBLUR_TIMING": "off", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN, json.dumps(settings), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return load_file(out / "model.safetensors"), json.loads(done.stdout.splitlines()[-1])["loaded"]


@pytest.mark.parametrize("world", WORLDS)
def test_accel_off__the_model_is_the_same_and_no_module_of_accel_is_loaded(world: str, tmp_path: Path) -> None:
    settings = {**SMALL, **WORLDS[world]}
    fast, used = trained(settings, tmp_path / "fast", "on")
    plain, unused = trained(settings, tmp_path / "plain", "off")
    assert unused == []
    assert f"fedblur.accel.{'replay' if world == 'traced' else 'kernels.cpu_layers'}" in used
    assert fast.keys() == plain.keys()
    for name, tensor in fast.items():
        torch.testing.assert_close(plain[name], tensor, rtol=1e-4, atol=1e-5)
