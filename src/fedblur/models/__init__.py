"""Models: plain nn.Modules, one file per family. GroupNorm only, and no buffers: see `fedblur.functional`."""

from fedblur.models.base import Model, make_model
from fedblur.models.char_mlp import CharMlp
from fedblur.models.cnn import Cnn
from fedblur.models.glyphs import Glyphs
from fedblur.models.gn_cnn import GnCnn
from fedblur.models.gn_resnet import GnResNet
from fedblur.models.leaves import Leaves
from fedblur.models.logistic import Logistic
from fedblur.models.mlp import Mlp
from fedblur.models.resnet18 import ResNet18

__all__ = [
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
