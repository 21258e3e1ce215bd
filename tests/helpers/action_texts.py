"""Action keys that are known: golden values, a vocabulary of bytes, XXH64 by the xxhash library."""

import pytest
import torch

import bipace_kernels as bk

xxhash = pytest.importorskip("xxhash", reason="xxhash is not installed")
MODES = ["action_tag", "first_n", "text"]


def key(data: bytes, seed: int) -> int:
    value = xxhash.xxh64_intdigest(data, seed)
    return value - 2**64 if value >= 2**63 else value


def table_of(parts: list[bytes]) -> bk.TokenBytes:
    lengths = torch.tensor([0, *map(len, parts)])
    return bk.TokenBytes(lengths.cumsum(0), torch.tensor(list(b"".join(parts)), dtype=torch.uint8))


def byte_table() -> bk.TokenBytes:
    """Token v is the byte v; 256 is special, 257 to 259 are long."""
    singles = [bytes([b]) for b in range(256)]
    return table_of([*singles, b"", b"<action>", b"</action>", b"a token longer than sixteen bytes"])


TABLE = byte_table()


def spelt(text: str | bytes) -> list[int]:
    return list(text.encode() if isinstance(text, str) else text)


# Typed in from the xxhash library (xxhsum -H1 with the seeds of docs/action_keys.md), so that a change of format shows.
GOLDEN_TEXT = [
    ("action_tag", "<think>so</think><action> click[B09XYZ]\n</action>", -7053967608502864303, True),
    ("action_tag", "<action></action>", 6514724804207875695, True),
    ("action_tag", "<action>\n \t</action> <action>go east</action>", 6514724804207875695, True),
    ("action_tag", "<action>GO EAST</action>", 3294382136398994447, True),
    ("action_tag", "look around", -177894628445147933, False),
    ("action_tag", "", 4188618682377417806, False),
    ("first_n", "look around", -177894628445147933, False),
    ("first_n", "x" * 64, -4716727464340282415, False),
    ("first_n", "x" * 64 + "what follows does not count", -4716727464340282415, False),
    ("text", "\r\n Go East\v\f", -8993013771304749442, True),
    ("text", "", -1041040636111009829, False),
    ("text", " \n", -1041040636111009829, False),
    ("text", "café 汉字 😀", -8900685160412145040, True),
]
GOLDEN_IDS = [
    ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], -8226852071813961318),
    ([5, -7, 1 << 40], -6511843743981271603),
    ([], -3049013831022690741),
]
