"""Fuzzes the reader of JSONL rollouts:  python tests/native/fuzz_jsonl.py [SECONDS] [SEED]

Seeded mutations of real lines.  Every file must either be read, into lists of equal length and the promised types, or
be refused with CliError naming the file and, where a line is at fault, the line and the field.  Any other exception is
a bug; its input is saved beside the message.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bipace_kernels.backends.schema import LIMIT
from bipace_kernels.cli._console import CliError
from bipace_kernels.cli.rollouts import Columns, Rollouts, read

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"
FIELDS = ("task_id", "rollout", "step", "observation", "reward", "action", "valid", "success", "fingerprint", "extra")
NUMBERS = "NaN Infinity -Infinity null true false 0.5 -1 3 -0.0 1e999 9223372036854775808 -9223372036854775809"
FRAGMENTS = (
    *NUMBERS.split(),
    *("1" * 400, "9" * 5000, "[" + "9" * 400 + "]", "[1.0, 1" + "0" * 400 + "]"),
    *('"3"', '""', '"\\ud800"', '"\\u0000"', '"\\ud83d\\ude00"', '"', "\\"),
    *("[]", "{}", "[1, 2]", '[1, "a"]', "[NaN, 1]", "[1e999]", "[1e300, -0.0, 1]", '{"a": {"a": 1}}', '{"\\ud800": 1}'),
    *("[" * 3000, "[" * 200_000, '{"a":' * 3000, ",", ":", "}", "\x00", "\ufeff", "\u2028"),
)
HEXADECIMAL = "ff c3 eda080 efbbbf 1f8b 0d 0a 0d0a 00 fffe 2020 0c"
RAW = [bytes.fromhex(word) for word in HEXADECIMAL.split()]


def real_lines() -> list[bytes]:
    """Some lines of the rollouts that ship with the project, with every optional field there now and then."""
    rng = random.Random(0)
    lines: list[bytes] = []
    for path in sorted(EXAMPLES.glob("*.jsonl.gz")):
        with gzip.open(path, "rb") as file:
            records = [json.loads(line) for line, _ in zip(file, range(60), strict=False)]
        for k, record in enumerate(records):
            if k % 2:
                record |= {"valid": rng.random() < 0.9, "fingerprint": [rng.random(), 1, -0.5]}
            lines.append(json.dumps(record, ensure_ascii=k % 3 == 0).encode() + b"\n")
    if not lines:
        raise SystemExit(f"fuzz_jsonl: no rollouts in {EXAMPLES}")
    return lines


def mutate_record(line: bytes, rng: random.Random) -> bytes:
    """Another value, a missing, renamed, repeated or swapped field."""
    record: dict[str, Any] = json.loads(line)
    field = rng.choice([*record, *FIELDS])
    kind = rng.randrange(5)
    if kind == 0:
        record.pop(field, None)
    elif kind == 1:
        record[field + rng.choice(("", " ", "x"))] = record.pop(field, None)
    elif kind == 2:
        other = rng.choice(list(record))
        record[field], record[other] = record[other], record.get(field)
    text = json.dumps(record)
    if kind == 3:  # text that json.dumps would not write
        value = rng.choice(FRAGMENTS)
        text = text[:-1] + f', "{field}": {value}' + "}"
    elif kind == 4 and f'"{field}": ' in text:
        head, _, tail = text.partition(f'"{field}": ')
        text = f'{head}"{field}": {rng.choice(FRAGMENTS)}' + (tail[tail.find(", ") :] if ", " in tail else "}")
    return text.encode("utf-8", "surrogatepass") + b"\n"


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    length = rng.choice((1, 1, 2, 8, 100))
    kind = rng.randrange(5)
    if kind == 0:
        return data[:at] + rng.choice(RAW) + data[at:]
    if kind == 1:
        return data[:at] + data[at + length :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + rng.choice(FRAGMENTS).encode("utf-8", "surrogatepass") + data[at:]
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def make(lines: list[bytes], rng: random.Random) -> bytes:
    chosen = rng.sample(lines, rng.randint(0, 6))
    for _ in range(rng.randint(0, 2)):
        if chosen:
            k = rng.randrange(len(chosen))
            chosen[k] = mutate_record(rng.choice(lines), rng)
    data = b"".join(chosen)
    for _ in range(rng.choice((0, 0, 1, 1, 3))):
        data = mutate_bytes(data, rng)
    if rng.random() < 0.15:
        data = gzip.compress(data, 1)
        if rng.random() < 0.7:
            data = mutate_bytes(data, rng)
    return data


def options(rng: random.Random) -> dict[str, Any]:
    pick: Callable[[tuple[str, ...]], list[str]] = lambda names: [n for n in names if rng.random() < 0.5]  # noqa: E731
    fingerprint = rng.random() < 0.4
    wanted = pick(("action", "valid", "success"))
    return {
        "columns": Columns(fingerprint="fingerprint") if fingerprint else Columns(),
        "needed": [*pick(("action",)), *(["fingerprint"] if fingerprint and rng.random() < 0.5 else [])],
        "wanted": [*wanted, *(["fingerprint"] if fingerprint else [])],
        "merge_files": rng.random() < 0.3,
        "duplicates": rng.choice(("raise", "once", "count")),
        "allow_nonfinite": rng.random() < 0.3,
    }


def check_read(rollouts: Rollouts, how: dict[str, Any]) -> None:
    n = len(rollouts)
    kinds: dict[str, tuple[type, ...]] = {
        "task": (str, int), "rollout": (str, int), "step": (int,), "observation": (str,), "reward": (float,),
        "action": (str,), "valid": (bool,), "success": (bool,), "fingerprint": (list,),
    }  # fmt: skip
    assert n > 0, "read without a record"
    for name, kind in kinds.items():
        values = getattr(rollouts, name)
        if values is None:
            assert name not in how["needed"], f"{name} was needed"
            continue
        assert len(values) == n, f"{name} has {len(values)} of {n} values"
        assert all(type(value) in kind for value in values), f"{name} holds another type"
    assert len(rollouts.group) == len(rollouts.trajectory) == n
    assert all(step >= 0 for step in rollouts.step)
    assert how["allow_nonfinite"] or all(abs(x) <= LIMIT for x in rollouts.reward), "a reward is huge or not finite"
    if rollouts.fingerprint:
        assert len({len(vector) for vector in rollouts.fingerprint}) == 1, "fingerprints of different length"
        np.array(rollouts.fingerprint, np.float32)  # what the program makes of them; an overflow is a warning, so fails
    "".join(str(x) for x in rollouts.task + rollouts.rollout + rollouts.observation).encode()


def check_refused(error: CliError, path: Path) -> str:
    """The kind of refusal; AssertionError where the message does not say what it must."""
    text = str(error)
    assert str(path) in text, "the message does not name the file"
    if re.search(r"line \d+(, field|: the field) ", text):
        return "line and field"
    if re.search(r"line \d+", text):
        return "line"
    assert re.search("holds no records|breaks off or is damaged|^No record of", text), "the message names no line"
    return "file"


def main(seconds: float, seed: int) -> int:
    warnings.simplefilter("error")
    rng = random.Random(seed)
    lines = real_lines()
    outcomes: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.jsonl"
        while time.monotonic() < deadline:
            data = make(lines, rng)
            how = options(rng)
            path.write_bytes(data)
            try:
                try:
                    check_read(read([str(path)], **how), how)
                    outcomes["read"] += 1
                except CliError as error:
                    outcomes[check_refused(error, path)] += 1
            except Exception as error:
                saved = Path("fuzz_jsonl.crash.jsonl").resolve()
                saved.write_bytes(data)
                print(f"{traceback.format_exc():.4000}", file=sys.stderr)
                print(f"fuzz_jsonl: {type(error).__name__} with seed {seed} and {how}", file=sys.stderr)
                print(f"fuzz_jsonl: input saved as {saved}", file=sys.stderr)
                return 1
    counts = ", ".join(f"{outcomes[name]} {name}" for name in ("read", "line and field", "line", "file"))
    print(
        f"fuzz_jsonl: {outcomes.total()} files in {seconds:.0f} s, seed {seed}: {counts} (refusals by what they name)"
    )
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(float(arguments[0]) if arguments else 20.0, int(arguments[1]) if len(arguments) > 1 else 1))
