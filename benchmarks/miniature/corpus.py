"""The text: Python's own standard library as bytes, read from disk, with whole files held out."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.miniature.shapes import SEPARATOR

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
_HELD_OUT_OF = 32
"""One file of so many is held out, chosen by a checksum of its name."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of training files and of held-out files, each one long tensor on the device."""

    training: torch.Tensor
    held_out: torch.Tensor

    def windows(self, count: int, length: int, *, seed: int, held_out: bool = False) -> torch.Tensor:
        """(count, length) token ids at random places; the same seed gives the same windows."""
        text = self.held_out if held_out else self.training
        generator = torch.Generator().manual_seed(seed)
        begins = torch.randint(0, text.numel() - length, (count, 1), generator=generator)
        return text[(begins + torch.arange(length)).to(text.device)]

    def most_frequent(self, count: int) -> torch.Tensor:
        """The `count` most frequent token ids of the training text, in ascending order."""
        frequency = torch.bincount(self.training.cpu(), minlength=SEPARATOR + 1)
        return frequency.argsort(descending=True, stable=True)[:count].sort().values


def read_corpus(device: torch.device, root: Path | None = None) -> Corpus:
    """Read every `.py` file below `root` (the running interpreter's standard library), without its tests."""
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    kept = [name for name in names if not _LEFT_OUT & set(name.parts)]
    held_out = [name for name in kept if zlib.crc32(name.as_posix().encode()) % _HELD_OUT_OF == 0]
    training = [name for name in kept if name not in set(held_out)]
    return Corpus(_tokens(folder, training, device), _tokens(folder, held_out, device))


def _tokens(folder: Path, names: list[Path], device: torch.device) -> torch.Tensor:
    parts: list[np.ndarray] = []
    for name in names:
        parts += [np.frombuffer((folder / name).read_bytes(), dtype=np.uint8).astype(np.int64), np.array([SEPARATOR])]
    return torch.from_numpy(np.concatenate(parts)).to(device)
