"""Your own PyTorch model on your own arrays, with an epsilon and its statement: `python examples/own_model.py`."""

import numpy as np
import torch
from torch import nn

import fedblur

# Your data: samples, labels, and which person each sample belongs to. Here 400 people, ten recordings each of a sensor.
rng = np.random.default_rng(0)
people, each, length = 400, 10, 32
owners = np.repeat(np.arange(people), each)
y = rng.integers(0, 3, people * each)  # what they did: rest, walk, run
pace = np.array([0.0, 2.0, 5.0])[y] * rng.uniform(0.9, 1.1, people)[owners]  # each person has their own
phase = pace[:, None] * np.arange(length) / length + rng.random((len(y), 1))
x = (np.sin(2 * np.pi * phase) + rng.normal(size=phase.shape)).astype(np.float32)  # [samples, length]

test = owners >= 350  # people who never train
data = fedblur.federation_from_arrays(
    x[~test], y[~test], owners[~test], x[test], y[test], classes=3, validation_share=0.1
)


class Spectrum(nn.Module):
    """Your model: any nn.Module without buffers; GroupNorm, not BatchNorm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(length // 2 + 1, 16), nn.GroupNorm(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(torch.fft.rfft(x).abs())


config = fedblur.Config(epsilon=4.0, rounds=60, sample_rate=0.2, clip_norm=0.3, method="blur+lus")  # no seed: private
run = fedblur.train(config, federation=data, module=Spectrum())
statement, path = fedblur.write_statement(run.path, tuning="settings chosen before the data were seen")

print(f"accuracy {run.accuracy:.2f} on people who never trained, epsilon {run.epsilon:.2f}, model in {run.path}")
print(f"{statement.one_line()}: {path}")
