"""Fuzzes every op of torch.ops.bipace on CPU tensors:  python tests/native/fuzz_ops.py [CALLS] [SEED] [FIRST]

Seeded mutations of calls that are right (tests/helpers/op_cases.py): other offsets, orders, labels, lengths, dtypes,
strides, numbers and words. Every call must give a result or raise ValueError, TypeError or RuntimeError (what torch's
schemas raise). A call that crashes or takes longer than LIMIT seconds ends the child process that makes the calls;
its number is what FIRST takes to go straight to it.
"""

import faulthandler
import mmap
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import bipace_kernels  # noqa: F401  registers the ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

LIMIT = 20  # seconds of a call
ALLOWED = (ValueError, TypeError, RuntimeError)
NUMBERS = (-(2**63), -(2**62), -3, -1, 0, 1, 2, 3, 7, 1000, 2**31, 2**40, 2**62, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 1e-300, 1e-6, 0.5, 1.0, 3.0, 1e300)
WORDS = ("", "x", "none", "std", "mean", "q_style", "batch", "group", "text", "first_n", "[" * 1000)


def mutated(value: Any, rng: random.Random) -> Any:
    """Another value for an argument."""
    if isinstance(value, torch.Tensor):
        return mutated_tensor(value, rng)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*NUMBERS, value - 1, value + 1))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(WORDS)
    if isinstance(value, list):
        return [rng.choice(FLOATS) for _ in range(rng.randrange(4))]
    return rng.choice((None, torch.zeros(0, dtype=torch.int64), torch.arange(3), torch.ones(4, dtype=torch.bool)))


def mutated_tensor(value: Any, rng: random.Random) -> Any:
    kind = rng.randrange(16)
    if kind == 0:
        return None
    if kind == 1:
        return value.to(rng.choice((torch.int8, torch.int32, torch.int64, torch.float16, torch.float64, torch.bool)))
    if kind == 2:
        return value[: rng.randrange(value.shape[0] + 1)]
    if kind == 3:
        return torch.cat([value, value])
    if kind == 4:
        return value[torch.randperm(value.shape[0], generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))]
    if kind == 5:
        return value[:1].expand(value.shape)  # of stride 0
    if kind == 6:
        return rng.choice((value.unsqueeze(0), value.flatten(), value.t() if value.ndim == 2 else value[:0]))
    if kind == 7:
        return value.flip(0)
    if value.numel() == 0:
        return value
    changed = value.clone(memory_format=torch.contiguous_format)
    flat = changed.view(-1)
    for _ in range(rng.choice((1, 1, 2, flat.numel()))):
        at = rng.randrange(flat.numel())
        if value.dtype == torch.bool:
            flat[at] = rng.random() < 0.5
        elif value.is_floating_point():
            flat[at] = torch.tensor(rng.choice(FLOATS), dtype=torch.float64)  # saturates, where a float is refused
        else:
            low, high = torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max
            flat[at] = min(max(rng.choice((*NUMBERS, *range(-2, 60))), low), high)
    return changed


def calls(seed: int, first: int, number: int) -> Any:
    """(number, name, args, kwargs) of each call: it depends on seed and number only."""
    from op_cases import OPS, op_cases  # in the folder that was just added to the path

    cases = {name: op_cases(name, "cpu") for name in OPS}
    for k in range(first, first + number):
        rng = random.Random(f"{seed} {k}")
        name = rng.choice(OPS)
        args, kwargs = rng.choice(cases[name])
        args, kwargs = list(args), dict(kwargs)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(len(args) + len(kwargs))
            if at < len(args):
                args[at] = mutated(args[at], rng)
            else:
                key = list(kwargs)[at - len(args)]
                kwargs[key] = mutated(kwargs[key], rng)
        yield k, name, args, kwargs


def make_calls(number: int, seed: int, first: int, place: str) -> int:
    """The child: writes the number of each call to `place` before it is made."""
    torch.set_num_threads(1)
    faulthandler.enable()
    outcomes: Counter[str] = Counter()
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), 8) as at:
        for k, name, args, kwargs in calls(seed, first, number):
            at[:] = k.to_bytes(8, "little")
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                getattr(torch.ops.bipace, name)(*args, **kwargs)
                outcomes["result"] += 1
            except ALLOWED as error:
                outcomes[type(error).__name__] += 1
            except Exception:
                print(f"fuzz_ops: {name}({args}, {kwargs})"[:4000], traceback.format_exc(), sep="\n", file=sys.stderr)
                return 1
            finally:
                faulthandler.cancel_dump_traceback_later()
    counts = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    print(f"fuzz_ops: {number} calls from {first}, seed {seed}: {counts}")
    return 0


def main(number: int, seed: int, first: int) -> int:
    with tempfile.NamedTemporaryFile() as place:
        place.write(bytes(8))
        place.flush()
        command = [sys.executable, __file__, str(number), str(seed), str(first), place.name]
        status = subprocess.run(command, env={**os.environ, "PYTHONFAULTHANDLER": "1"}).returncode
        if status:
            k = int.from_bytes(Path(place.name).read_bytes(), "little")
            again = f"again by: fuzz_ops.py 1 {seed} {k}"
            print(f"fuzz_ops: ended with status {status} in call {k}; {again}", file=sys.stderr)
        return 1 if status else 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:4]]
    number, seed, first = (*given, *(20_000, 1, 0)[len(given) :])
    if len(sys.argv) > 4:
        sys.exit(make_calls(number, seed, first, sys.argv[4]))
    sys.exit(main(number, seed, first))
