"""FedBlur: federated learning with user-level differential privacy.

import fedblur

run = fedblur.train(fedblur.Config(dataset="digits", method="blur+lus", epsilon=2.0))
print(run.accuracy, run.epsilon)
"""

from fedblur.config import Config, LocalTraining
from fedblur.data.federation import federation_from_arrays, load_federation
from fedblur.data.population import Federation
from fedblur.errors import FedBlurError
from fedblur.planning import Outlook, Setting, outlook
from fedblur.registry import register
from fedblur.setup import Machine
from fedblur.train import Run, resume, train

__all__ = [
    "Config",
    "FedBlurError",
    "Federation",
    "LocalTraining",
    "Machine",
    "Outlook",
    "Run",
    "Setting",
    "federation_from_arrays",
    "load_federation",
    "outlook",
    "register",
    "resume",
    "train",
]
