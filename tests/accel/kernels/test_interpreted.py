"""What the GPU's kernels say is right, also where there is no GPU: each in Triton's interpreter against float64."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux only"),
    pytest.mark.xdist_group("interpreted"),
]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """A process of its own: kernels are interpreted or compiled by what the environment says when they are imported."""
    command = [sys.executable, "-m", "tests.accel.kernels.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("part", ["convolutions", "relu_and_dropout", "pooled", "dense_update"])
def test_kernels__agree_with_float64_in_the_interpreter(part: str, interpreted: dict[str, Any]) -> None:
    assert interpreted[part] < 1e-6
