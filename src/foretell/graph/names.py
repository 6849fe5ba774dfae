"""Strings kept once and named by number, so that text columns are numbers too."""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt


class Names:
    """An immutable list of different strings; number 0 is the empty one."""

    def __init__(self, texts: Iterable[str] = ("",)) -> None:
        self._texts = tuple(texts)
        assert self._texts[:1] == ("",)

    def __getitem__(self, number: int) -> str:
        return self._texts[number]

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self._texts == other._texts

    def __hash__(self) -> int:
        return hash(self._texts)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self._texts)}

    def is_unique(self) -> bool:
        """Whether no string is here twice."""
        return len(self._numbers) == len(self._texts)

    def number(self, text: str) -> int:
        """The number of a string, -1 where it is not here."""
        return self._numbers.get(text, -1)

    def matching(self, text: str) -> npt.NDArray[np.int32]:
        """Numbers of all strings that equal `text` or, where it holds `*`, match it."""
        if "*" not in text:
            found = self.number(text)
            return np.array([found] if found >= 0 else [], dtype=np.int32)
        wanted = re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)
        hits = [i for i, t in enumerate(self._texts) if wanted.fullmatch(t)]
        return np.array(hits, dtype=np.int32)

    def adding(self, texts: Iterable[str]) -> "Names":
        """These names and, after them, those of `texts` that are new; self where none is."""
        new = [t for t in dict.fromkeys(texts) if t not in self._numbers]
        return Names(self._texts + tuple(new)) if new else self

    def numbers(self, texts: Iterable[str]) -> npt.NDArray[np.int32]:
        """The numbers of strings that are all here."""
        return np.array([self._numbers[t] for t in texts], dtype=np.int32)
