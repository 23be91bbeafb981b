"""Old module paths: `import fedblur.registry` still finds what is `fedblur.core.registry` now."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

# Modules of version 0.2 that users' files import (plugins, deployed apps, notebooks), and the rooms that they moved to.
_MOVED = {
    "accel": "kernels",
    "core": "config errors hashing plugins registry rng version",
    "experiments": "audit forecast recipe",
    "learning": "batches client evaluation methods models",
    "privacy": "accountants accounting clipping events ledger mechanisms planning renyi_discrete sampling",
    "report": "loggers",
    "training": "checkpoint round server setup summary",
}
RENAMED = {
    "adaptive": "training.adaptive_clipping",
    "audit.laws": "privacy.laws",
    "audit.tiny_world": "experiments.audit.worst_case",
    "binding": "privacy.mechanisms.base",
    "bounding": "privacy.clipping",
    "chain": "privacy.ledger",
    "costs": "experiments.cost_model",
    "data.dirichlet": "data.partition",
    "data.raw": "data.dataset",
    "denoising": "training.denoise",
    "dropout": "learning.randomness",
    "diagnostics": "engines.cohort_sum",
    "engines.base": "engines.cohort_sum",
    "engines.flower": "flower",
    "engines.isolation": "engines.isolation_check",
    "engines.processes": "engines.cohort_sum",
    "experiments.audit.laws": "privacy.laws",
    "fairness": "learning.evaluation",
    "flower.member": "flower.secure_sum_client",
    "flower.sums": "flower.secure_sum_server",
    "flower.training": "flower.node_training",
    "functional": "learning.module_function",
    "kernels.layers": "accel.kernels.fused_layers",
    "kernels.single": "accel.kernels.cpu_layers",
    "masks": "training.public_mask",
    "models.norms": "learning.models.base",
    "models.wavelets": "learning.models.gn_resnet",
    "norms": "privacy.clipping",
    "mechanisms.discrete_gaussian": "privacy.mechanisms.ddgauss",
    "mechanisms.fixed_point": "privacy.mechanisms.gaussian",
    "mechanisms.grid": "privacy.mechanisms.secure_sum",
    "mechanisms.lattice": "privacy.mechanisms.discrete_sampler",
    "mechanisms.poisson": "privacy.mechanisms.skellam",
    "mechanisms.rejection": "privacy.mechanisms.rounded_gaussian",
    "results": "experiments.result_store",
    "runfolder": "training.run_folder",
    "selection": "privacy.private_selection",
    "spec": "experiments.table_spec",
    "threads": "accel.cpu",
    "training.measure": "training.loop",
    "trials": "experiments.search_runner",
    "tuning": "experiments.private_search",
    "verification": "training.verify_ledger",
    "voting.augment": "voting.student",
    "voting.pool": "voting.setup",
    "voting.summary": "voting.protocol",
    "voting.tally": "voting.release",
    "watching": "core.callbacks",
} | {name: f"{room}.{name}" for room, names in _MOVED.items() for name in names.split()}


class OldNames(MetaPathFinder, Loader):
    """Find a module of version 0.2 under its old name: the very same module, not a second one."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("fedblur."):
            return None
        old = next((old for old in RENAMED if f"{name}.".startswith(f"fedblur.{old}.")), None)
        if old is None:
            return None
        new = f"fedblur.{RENAMED[old]}{name[len('fedblur.' + old) :]}"
        return ModuleSpec(name, self, origin=new, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(str(spec.origin))
        self._own = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._own  # which the import system has just replaced


def install() -> None:
    """Let Python's imports find old names."""
    sys.meta_path.insert(0, OldNames())  # asked first: a moved package would find its files a second time
