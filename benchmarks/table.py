"""Time and memory of a federation from a large Parquet file with string ids.

python -m benchmarks.table                     10 million rows of 500,000 users
python -m benchmarks.table --rows 1000000
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

_PART = 10**6  # rows that are generated at once
SCHEMA = {
    "genre": {"categories": [f"genre {number}" for number in range(20)]},
    "age": {"range": [0, 100]},
}


def generate(path: Path, rows: int, users: int) -> None:
    """Write rows in no order: an id, a time, a category, four numbers and a rating."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, writer = np.random.default_rng(0), None
    for start in range(0, rows, _PART):
        count = min(_PART, rows - start)
        ids = rng.integers(0, users, count)
        part = pa.table(
            {
                "user": pa.array([f"person-{number:07d}" for number in ids]),
                "when": rng.integers(0, 10**9, count),
                "genre": pa.array([f"genre {number}" for number in rng.integers(0, 20, count)]),
                "age": rng.uniform(0, 100, count),
                **{f"x{number}": rng.normal(size=count) for number in range(3)},
                "rating": rng.uniform(1, 10, count),
            }
        )
        writer = writer or pq.ParquetWriter(path, part.schema)
        writer.write_table(part)
    assert writer is not None
    writer.close()


def measure(path: Path) -> dict[str, float]:
    """Return what reading costs, in this process: run it in one of its own."""
    import fedblur

    fedblur.federation_from_table  # noqa: B018, imports torch before the clock starts
    import pyarrow.parquet  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    data = fedblur.federation_from_table(path, "user", "rating", schema=SCHEMA, time="when", public=True)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = data.train.x  # type: ignore[attr-defined]
    return {
        "clients": data.train.clients,
        "train_rows": len(x),
        "features": x.shape[1],
        "result_mib": (x.nbytes + data.test.x.nbytes) / 2**20,  # type: ignore[union-attr]
        "seconds": round(seconds, 1),
        "peak_mib": round((peak - before) / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--users", type=int, default=500_000)
    parser.add_argument("--file", type=Path, help="measure this file (a process of its own)")
    given = parser.parse_args()
    if given.file is not None:
        print(json.dumps(measure(given.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        generate(path, given.rows, given.users)
        size = path.stat().st_size / 2**20
        command = [sys.executable, "-m", "benchmarks.table", "--file", str(path)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(json.dumps({"rows": given.rows, "users": given.users, "file_mib": round(size), **found}, indent=2))


if __name__ == "__main__":
    main()
