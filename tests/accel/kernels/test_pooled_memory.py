"""The C kernels under gcc's sanitizers: no byte outside of what they were given, nothing that C leaves undefined."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fedblur.accel.kernels import native

HARNESS = Path(__file__).with_name("pooled_harness.c")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wno-psabi")


def compiled(folder: Path, source: Path, *flags: str) -> Path | None:
    """The program, or None where this compiler has no sanitizers."""
    program = folder / "program"
    command = [*(native._compiler() or ["none"]), *SANITIZED, *flags, str(source), "-o", str(program)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError):
        return None
    return program


@pytest.mark.parametrize(
    ("shape", "cpu"),
    [
        ((3, 3, 32), "native"),
        ((2, 3, 48), "x86-64-v3"),  # vectors of 8 values
        ((3, 3, 32), "x86-64"),  # of 4
        ((1, 16, 1), "native"),
        ((3, 3, 160), "native"),
    ],
)
def test_pooled__stays_within_its_memory(shape: tuple[int, int, int], cpu: str, tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }")
    if native._compiler() is None or compiled(tmp_path, tmp_path / "empty.c", f"-march={cpu}") is None:
        pytest.skip("no C compiler with address and undefined sanitizers here")
    constants = [f"-D{name}={value}" for name, value in zip(("KH", "KW", "CIN"), shape, strict=True)]
    kernels = Path(native.__file__).parent
    program = compiled(tmp_path, HARNESS, f"-march={cpu}", f"-I{kernels}", *constants)
    assert program is not None
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (ran.stdout, ran.returncode) == ("ok\n", 0), ran.stderr
