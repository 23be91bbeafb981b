"""Models: plain nn.Modules, one file per family. GroupNorm only, and no buffers (`learning/module_function.py`)."""

from fedblur.learning.models.base import Model, make_model
from fedblur.learning.models.char_gru import CharGru
from fedblur.learning.models.char_mlp import CharMlp
from fedblur.learning.models.cnn import Cnn
from fedblur.learning.models.glyphs import Glyphs
from fedblur.learning.models.gn_cnn import GnCnn
from fedblur.learning.models.gn_resnet import GnResNet
from fedblur.learning.models.leaves import Leaves
from fedblur.learning.models.logistic import Logistic
from fedblur.learning.models.mlp import Mlp
from fedblur.learning.models.resnet18 import ResNet18

__all__ = [
    "CharGru",
    "CharMlp",
    "Cnn",
    "Glyphs",
    "GnCnn",
    "GnResNet",
    "Leaves",
    "Logistic",
    "Mlp",
    "Model",
    "ResNet18",
    "make_model",
]
