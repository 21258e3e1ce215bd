"""One process of several: trains in each of the given ways, and writes its batches.  torchrun … trl_ranks.py FOLDER
OPTIONS

OPTIONS: a JSON object {name of the way: options of the trainer}
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import tiny_trl as tt
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from bipace_kernels.integrations.trl import rows, trainer as trainer_of_trl
from bipace_kernels.integrations.trl.credit import prepare

RANK = int(os.environ["RANK"])
_init = AcceleratorState.__init__


def init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    """accelerate shards by FSDP where there are several GPUs, NPUs, …; this adds several CPUs to its list."""
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


AcceleratorState.__init__ = init


def main(folder: Path, options: dict) -> dict:
    names = ("bad_rank", "without", "resume", "images", "promptless", "seen_by")
    bad_rank, without, resumed, images, promptless, seen_by = (options.pop(name, None) for name in names)
    if images == RANK:  # as a model for images has them in its batch
        trainer_of_trl.prepare = lambda a, b, output, *c, **d: prepare(a, b, {**output, "pixel_values": 0}, *c, **d)

    def rollout(prompts, trainer):
        out = tt.rollout(prompts, trainer)
        if without == RANK:
            del out["step_rewards"]
        if promptless == RANK:
            out["prompt_ids"][1] = []
        bad = {"step_rewards": [[1.0] * 9]} if trainer.num_iterations == 1 else {"turn_starts": [[99]]}
        return {**out, **{name: rows * len(prompts) for name, rows in bad.items()}} if bad_rank == RANK else out

    trainer = tt.make_trainer(folder, rollout_func=rollout, **options)
    if seen_by == RANK:
        trainer._prepare_inputs = partial(trainer._prepare_inputs)
    try:
        trainer.train(resume_from_checkpoint=resumed and str(folder.parent / resumed))
    except ValueError as error:
        return {"error": str(error)}
    for batch in trainer.batches:
        turns = rows.turns_of(batch["output"]["completion_mask"], batch["output"]["tool_mask"], None)
        batch["turns"] = len(turns)
    logged = [log for log in trainer.state.log_history if "loss" in log]
    sharded = {type(p).__name__ for p in trainer.model.parameters()}
    kept = {"epsilon": trainer._bipace.epsilon, "memory": len(trainer._bipace.memory or ())}
    return {"batches": trainer.batches, "log": logged, "parameters": sharded, **kept}


if __name__ == "__main__":
    folder, ways = Path(sys.argv[1]), json.loads(sys.argv[2])
    found = {name: main(folder / name, options) for name, options in ways.items()}
    torch.save(found, folder / f"rank{RANK}.pt")
