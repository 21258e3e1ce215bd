"""Lists and texts that do not say how long they are."""

from typing import Any


class LyingList(list[Any]):
    """A list whose len() gives the lengths stated, one after the other, the last for ever."""

    def __init__(self, items: Any, *lengths: int) -> None:
        super().__init__(items)
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]


class LyingText(str):
    def __len__(self) -> int:
        return 10**8

    def encode(self, *_: Any) -> bytes:
        return b"something else"
