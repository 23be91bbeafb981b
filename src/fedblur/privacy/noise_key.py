"""The secret of a run's correlated noise: keys and a count of released steps, outside of the run's folder.

Noise of later rounds takes off what earlier rounds added, so a run that is resumed must have the earlier noise again.
It is made again from these keys, never stored. Whoever has keys and results can subtract the noise, so they lie beside
the populations, for this user alone, and are removed when the run is complete: a copy of the run's folder has none.

    keys      (first step, 32 bytes), one for each time that the run was started or resumed
    served    the last step whose noise was released, on disk before it is

Formal guarantee: no noise is released twice. A step that was served is refused; after a kill the run goes on with the
next step, since what it had released is unknown. A process draws fresh noise from a fresh key alone: if folder and keys
are both put back to an earlier state, steps are released twice, with independent noise.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedblur.core.errors import PrivacyError, RunError
from fedblur.core.files import demand_digest, make_folder, read_json_if_there, remove, with_digest, write_atomically
from fedblur.core.rng import Keystream
from fedblur.privacy.populations import home

_LOST = "restore it from a copy, or start a new run (on these clients it adds to the total)"


class NoiseKey:
    """The keys of one run, and how many steps of its noise were released."""

    def __init__(
        self, path: Path, keys: list[tuple[int, bytes]], served: int, known: dict[str, Any] | None = None
    ) -> None:
        self.path = path
        self._keys = keys
        self.served = served
        self._known = known

    @classmethod
    def of(cls, stream: str, paid: int) -> NoiseKey:
        """Return the keys of the run with this stream and `paid` releases, with a fresh one for what follows.

        Steps that were paid count as served, whether or not their noise was released.
        """
        path = home() / ".noise" / f"{stream}.json"
        table = read_json_if_there(path, _LOST)
        if table is None and paid:
            raise RunError(
                f"the noise keys of this run are not here ({path}): only the user who began it, on that machine, can "
                f"resume it; {_LOST}"
            )
        if table is None:
            return cls(path, [(1, os.urandom(32))], 0)  # on disk with the first step
        demand_digest(table, path, _LOST, required=True)
        keys = [(int(first), bytes.fromhex(text)) for first, text in table["keys"]]
        served = max(int(table["served"]), paid)
        return cls(path, [*keys, (served + 1, os.urandom(32))], served, table)

    def keystream(self, step: int) -> Keystream:
        """Return the key of a step's fresh noise."""
        secret = next(key for first, key in reversed(self._keys) if first <= step)
        return Keystream(hashlib.blake2b(f"step {step}".encode(), key=secret, digest_size=32).digest())

    def serve(self, step: int) -> None:
        """Write down that a step's noise is about to be released; refuse one that was."""
        if step <= self.served:
            raise PrivacyError(f"the noise of step {step} was released before; a second release would reveal clients")
        if read_json_if_there(self.path, _LOST) != self._known:
            raise PrivacyError(
                f"{self.path} was changed by another process: a copy of this run goes on elsewhere; {_LOST}"
            )
        if self._known is None:
            make_folder(self.path.parent, private=True, way_out="set FEDBLUR_POPULATIONS to a folder")
        self.served = step
        self._write()

    def forget(self) -> None:
        """Remove the keys of a run that is complete: from now on nobody can make its noise again."""
        remove(self.path)

    def _write(self) -> None:
        keys = [[first, key.hex()] for first, key in self._keys]
        self._known = with_digest({"keys": keys, "served": self.served})
        write_atomically(self.path, json.dumps(self._known).encode(), private=True)
