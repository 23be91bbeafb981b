"""Shakespeare's plays by speaker: next-character prediction, to show that nothing is tied to images. No download.

A client is a speaker in one play, with at most 1,400 characters of its text. A sample is a window of characters and the
one that follows, or a piece of text with the next character at each position. The texts are in the public domain;
plays.txt names their source.
"""

from __future__ import annotations

import bz2
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.data.dataset import Dataset, Form, Raw
from fedblur.data.holdout import check_share
from fedblur.data.population import Samples, one_input

LETTERS = "\n abcdefghijklmnopqrstuvwxyz',.;:?!-"  # token 0 also stands before the first character of a text
_LONGEST = 64


@register("dataset", "plays")
@dataclass(frozen=True)
class Plays(Dataset):
    """Predict the next character; the last part of what each speaker says is held out for test."""

    window: int = 8  # characters that a prediction may look at
    each: bool = False  # a target at each position, for task "next-token"; pieces of `window` do not overlap then
    test_share: float = 0.2  # of each speaker's words, from the end

    default_partition: ClassVar[str] = "natural"
    default_clients: ClassVar[int | None] = None
    summary: ClassVar[str] = "next characters in Shakespeare's 37 plays, 36 characters, 894 speakers (text)"
    public: ClassVar[bool] = True
    text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.window <= _LONGEST:
            raise ConfigError(f"dataset.plays.window={self.window} must be from 1 to {_LONGEST}")
        check_share("dataset.plays.test_share", self.test_share)

    def form(self) -> Form:
        return (self.window,), len(LETTERS)

    def load(self, data_dir: Path | None) -> Raw:
        people, train, test, owners = speakers(), [], [], []
        cut_up = _pieces if self.each else _windows
        for speaker, (_, text) in enumerate(people):
            tokens = encode(text)
            cut = round(len(tokens) * (1 - self.test_share))
            train.append(cut_up(tokens[:cut], self.window))
            test.append(cut_up(tokens[cut:], self.window))  # reads nothing from before the cut
            owners.append(torch.full((len(train[-1]),), speaker))
        note = f"speakers of plays, the last {self.test_share:.0%} of each one's words held out for test"
        names = tuple(name for name, _ in people)
        made_up = "synthetic users, not speakers"
        return Raw(_joined(train), _joined(test), torch.cat(owners), len(LETTERS), note, made_up, names)


def speakers() -> list[tuple[str, str]]:
    """Return ("hamlet/HAM", words) of every speaker."""
    packed = files("fedblur.data").joinpath("plays.bz2").read_bytes()
    entries = bz2.decompress(packed).decode("ascii").split("\f")
    return [(name, text) for name, _, text in (entry.partition("\n") for entry in entries)]


def encode(text: str) -> Tensor:
    """Return the place of each character in LETTERS: [characters], int16."""
    place = {letter: index for index, letter in enumerate(LETTERS)}
    return torch.tensor([place[letter] for letter in text], dtype=torch.int16)


def _windows(tokens: Tensor, window: int) -> Samples:
    """Return every character with the `window` before it; the first ones see the empty beginning."""
    padded = torch.cat([tokens.new_zeros(window), tokens])
    return Samples(padded.unfold(0, window, 1)[:-1], tokens.long())


def _pieces(tokens: Tensor, window: int) -> Samples:
    """Return every character once as a target, after those of its piece before it. Padding has the target -100."""
    rows = -(-len(tokens) // window)
    padding = rows * window - len(tokens)
    before = torch.cat([tokens.new_zeros(1), tokens[:-1], tokens.new_zeros(padding)]).view(rows, window)
    targets = torch.cat([tokens.long(), torch.full((padding,), -100)]).view(rows, window)
    return Samples(before, targets)


def _joined(parts: list[Samples]) -> Samples:
    return Samples(torch.cat([one_input(part.x, "plays") for part in parts]), torch.cat([part.y for part in parts]))
