"""What two processes check: `python hidden_ranks.py RANK FOLDER CASE...` writes FOLDER/RANK.json by case."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import tiny_models as tm
import torch
import torch.distributed as dist

import bipace_kernels as bk
import bipace_kernels.hidden.layers

LAYERS = (-8, -3, -1)


def wrap_fsdp1(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


def wrap_fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def wrap_zero3(model: Any) -> Any:
    import deepspeed

    # Threshold 0: DeepSpeed keeps parameters as small as these whole otherwise.
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True},
    )  # fmt: skip
    return engine


ddp = torch.nn.parallel.DistributedDataParallel
WRAPPERS = {"ddp": ddp, "fsdp1": wrap_fsdp1, "fsdp2": wrap_fsdp2, "zero3": wrap_zero3}


def plain_states(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Hidden states of the bare model by Hugging Face itself, at the last token, and pooled over the prompt."""
    states = tm.hidden_states(tm.make(), ids, mask)
    at = (torch.arange(len(ids)), bk.hidden.last_tokens(mask))
    found = {str(layer): states[layer][at] for layer in LAYERS}
    mean = (states[-8].double() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return {**found, "mean": mean}


def check_tap(wrap: Callable[[Any], Any]) -> dict[str, Any]:
    """A training forward with the tap on: rows as the bare model gives them, and the same gradients as without it."""
    rank = dist.get_rank()
    ids, mask = tm.prompts(3 + rank, seed=10 + rank)
    where = {"attention_mask": mask, "position_ids": tm.position_ids(mask)}
    want = plain_states(ids, mask)
    losses, rows = [], {}
    for on in (False, True):
        model = wrap(tm.make())
        tapped = bk.hidden.tap(model, layers=LAYERS)
        pooled = bk.hidden.tap(model, layers=LAYERS[:2], pooling=("mean", "attention"))
        with tapped if on else contextlib.nullcontext(), pooled if on else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids, **where).loss
        model.backward(loss) if hasattr(model, "backward") else loss.backward()
        if on:
            rows = {str(layer): tapped.rows(layer) for layer in LAYERS} | {"mean": pooled.rows(-8, "mean")}
            attention = pooled.rows(-8, "attention")
        losses.append((float(loss.detach()), gradients(model)))
    alone = tm.make()
    with bk.hidden.tap(alone, -8, pooling="attention") as tapped:
        alone(input_ids=ids, **where)
    rows["attention"], want["attention"] = attention, tapped.rows()
    return {
        "errors": {name: float((tm.unit(rows[name]) - tm.unit(want[name])).norm(dim=1).max()) for name in rows},
        "same_loss": losses[0][0] == losses[1][0],
        "same_gradients": losses[0][1] == losses[1][1],
    }


def gradients(model: Any) -> list[float]:
    """Sums of the local gradients; ZeRO keeps the whole ones to itself and gives them out on request."""
    if hasattr(next(model.parameters()), "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        return [float(safe_get_full_grad(p).double().sum()) for p in model.parameters()]
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [float((g.to_local() if hasattr(g, "to_local") else g).double().sum()) for g in found]


def check_extract(wrap: Callable[[Any], Any]) -> dict[str, Any]:
    """Early exit with another number of prompts and micro-batches on each rank, before and between training steps."""
    rank = dist.get_rank()
    ids, mask = tm.prompts(2 + 5 * rank, seed=20 + rank)
    want = plain_states(ids, mask)
    model = wrap(tm.make())
    forwards: list[int] = []
    handle = bk.hidden.layers.find_decoder(model).blocks[0].register_forward_hook(lambda *_: forwards.append(1))
    given: dict[str, Any] = {"token_budget": 30}
    rows = {str(layer): bk.hidden.extract(model, ids, mask, layer, **given) for layer in LAYERS}
    counts = len(forwards)
    handle.remove()
    own_roots = [is_root(block) for block in bk.hidden.layers.find_decoder(model).blocks]
    before = training_step(model)
    again = bk.hidden.extract(model, ids, mask, -8, pooling="mean", **given)
    rows["mean"] = bk.hidden.extract(wrap(tm.make()), ids, mask, -8, pooling="mean", **given)
    errors = {name: float((tm.unit(rows[name]) - tm.unit(want[name])).norm(dim=1).max()) for name in rows}
    try:
        bk.hidden.extract(model, ids[0] if rank else ids, None if rank else mask)
        error = ""
    except (ValueError, RuntimeError) as caught:
        error = type(caught).__name__
    return {"errors": errors, "forwards": counts, "own_roots": any(own_roots),
            "moved": not torch.equal(again, rows["mean"]),
            "loss": before == training_step(wrap(tm.make())), "error": error}  # fmt: skip


def check_interrupt(wrap: Callable[[Any], Any], *, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """A stop inside a forward, on all ranks at the same block: what is done afterwards is as if it had not been."""
    rank = dist.get_rank()
    ids, mask = tm.prompts(4, seed=20 + rank)
    model = wrap(tm.make())
    bk.hidden.extract(model, ids, mask)  # FSDP makes itself ready in its first forward
    before, stopped = tree(model), ""
    block = bk.hidden.layers.find_decoder(model).blocks[1]
    handle = block.register_forward_hook(Mock(side_effect=KeyboardInterrupt)) if rank in ranks else None
    try:
        bk.hidden.extract(model, ids, mask)
    except (KeyboardInterrupt, RuntimeError) as error:
        stopped = type(error).__name__
    if handle is not None:
        handle.remove()
    found: dict[str, Any] = {"stopped": stopped, "tree": tree(model) == before}
    if len(ranks) < 2:
        return found
    rows = tm.unit(bk.hidden.extract(model, ids, mask))
    found["error"] = float((rows - tm.unit(plain_states(ids, mask)["-8"])).norm(dim=1).max())
    found["loss"] = training_step(model) == training_step(wrap(tm.make()))
    return found


def tree(model: Any) -> list[Any]:
    """What modules there are, where, and in which mode."""
    return [(id(m), m.training, [(name, id(child)) for name, child in m._modules.items()]) for m in model.modules()]


def is_root(block: Any) -> bool:
    """Whether FSDP treats a block as a root: it would gather by itself, and stay unsharded after its forward."""
    state = block._get_fsdp_state() if hasattr(block, "_get_fsdp_state") else block
    return bool(getattr(state, "_is_root", False))


def training_step(model: Any) -> tuple[float, list[float]]:
    """Loss and gradients of one step; what was extracted before must not show."""
    model.train()
    ids, mask = tm.prompts(3, seed=30 + dist.get_rank())
    loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    model.backward(loss) if hasattr(model, "backward") else loss.backward()
    found = float(loss.detach()), gradients(model)
    if hasattr(model, "backward"):
        model.step()
    else:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return found


# A stop only on rank 0, which then exits: the last case of its processes, since it breaks their group.
check_alone = partial(check_interrupt, ranks=(0,))
CHECKS = {"tap": check_tap, "extract": check_extract, "interrupt": check_interrupt, "alone": check_alone}


def main(rank: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for case in cases:
        check, wrapper = case.split(":")
        try:
            found[case] = CHECKS[check](WRAPPERS[wrapper])
        except Exception:
            found[case] = {"failed": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
