"""Patches that verl's trainers need to run completely on CPUs; loaded in each of their processes.

    VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda VERL_ENGINE_VENDOR=nvidia

A platform; a rollout engine ("hf": one server, which samples from a Hugging Face model that gets verl's weights);
agent loops of several turns, in one row or in a row per step; and the rows that reach the update, written to a folder,
$VERL_ON_CPU_FOLDER.  All go by verl's own registries.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import random
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils import import_utils

FOLDER = Path(os.environ.get("VERL_ON_CPU_FOLDER", "."))
KEPT = (
    "uid", "session_id", "bipace_row", "input_ids", "responses", "response_mask", "attention_mask", "rm_scores",
    "advantages"
)  # fmt: skip


class TorchCPU:
    """torch.cpu, with the questions that verl has for GPUs."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {"mem_get_info": (1 << 30, 1 << 30), "get_device_name": "CPU"}
        return getattr(torch.cpu, name, lambda *_, **__: answers.get(name, 0))


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """Places in Ray are called GPU, and tensors are on the CPU."""

    device_name = "cpu"
    vendor_name = "nvidia"

    device_module = TorchCPU()

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index=None):
        pass

    synchronize = empty_cache = manual_seed = manual_seed_all = set_allocator_settings = set_device

    def communication_backend_name(self):
        return "gloo"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield


_init_process_group = dist.init_process_group


@functools.wraps(_init_process_group)
def init_process_group(backend=None, **given):
    """verl asks for "cpu:gloo" and "DEVICE:BACKEND": here they are one."""
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **given)


dist.init_process_group = init_process_group
# verl 0.9.1 takes from TRL, where that is installed, what TRL 1.16 has no more.
import_utils.is_trl_available = lambda: False

# After the platform, which these ask for.
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.rollout import base  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: E402
from verl.workers.rollout.utils import ensure_async_iterator  # noqa: E402


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


class Server:
    """Samples from a model, whose weights are written to the folder, by the step that made them."""

    def __init__(self, path, rank):
        torch.set_num_threads(1)
        self.rank, self.model, self.step, self.open, self.reject = rank, load(path), None, asyncio.Event(), False
        self.open.set()

    async def set_weights(self, weights, step):
        self.model.load_state_dict(weights, strict=False)
        self.step = step
        torch.save(weights, FOLDER / f"weights-{self.rank}.tmp")
        os.replace(FOLDER / f"weights-{self.rank}.tmp", FOLDER / f"weights-{step}.pt")

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        if self.reject:  # the client asks another server
            fields = {"global_steps": self.step}
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=fields)
        await self.open.wait()
        ids, log_probs = list(prompt_ids), []
        for _ in range(sampling_params["max_tokens"]):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(torch.multinomial(logits.exp(), 1)))
            log_probs.append(float(logits[ids[-1]]))
        written = ids[len(prompt_ids) :]
        fields = {"global_steps": self.step}
        return TokenOutput(token_ids=written, log_probs=log_probs, stop_reason="completed", extra_fields=fields)

    async def abort_all_requests(self, reject_request=False):
        self.open.clear()
        self.reject = reject_request

    async def resume_generation(self):
        self.open.set()
        self.reject = False

    async def nothing(self, *_, **__):
        pass

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


def name_of(rank):
    return f"hf_server_{rank}"


class Replica(RolloutReplica):
    async def launch_servers(self):
        made = ray.remote(Server).options(name=name_of(self.replica_rank), max_concurrency=100)
        self._server_handle = made.remote(self.model_config.path, self.replica_rank)
        self._server_address = name_of(self.replica_rank)
        self.servers = [self._server_handle]


class ServerAdapter:
    """The end of the rollout engine in the workers: hands on their weights."""

    def __init__(self, config, model_config, device_mesh, replica_rank=None, **_):
        self.replica_rank = int(os.environ["RANK"]) if replica_rank is None else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags):
        pass

    release = resume

    async def update_weights(self, weights, global_steps=None, **_):
        full = {name: weight.detach().cpu().clone() async for name, weight in ensure_async_iterator(weights)}
        await ray.get_actor(name_of(self.replica_rank)).set_weights.remote(full, global_steps)


base._ROLLOUT_REGISTRY["hf", "async"] = f"{__name__}.ServerAdapter"
RolloutReplicaRegistry.register("hf", lambda: Replica)


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """Weights on their way to a rollout engine elsewhere, for separate_async, where verl would take NCCL."""

    def __init__(self, bucket_size, is_master=False):
        self.is_master = is_master

    def prepare(self):
        return None

    @classmethod
    def build_topology(cls, actors, rollouts, metadata):
        return {"rank": list(range(actors))}, {"rank": list(range(rollouts))}

    def init_process_group(self, rank):
        pass

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        full = {name: weight.detach().cpu().clone() for name, weight in weights}
        if self.is_master:
            torch.save(full, FOLDER / "sending.pt")
            os.replace(FOLDER / "sending.pt", FOLDER / f"sent-{global_steps}.pt")

    async def receive_weights(self, global_steps=None):
        while not (FOLDER / f"sent-{global_steps}.pt").exists():
            await asyncio.sleep(0.1)
        for name, weight in torch.load(FOLDER / f"sent-{global_steps}.pt").items():
            yield name, weight


@register("turns")
class Turns(AgentLoopBase):
    """One to three turns of three tokens in one row, an answer of two between them; `several`: each in its own row."""

    several = False

    async def run(self, sampling_params, **given):
        ids = self.tokenizer.apply_chat_template(given["raw_prompt"], add_generation_prompt=True, return_dict=False)
        start, mask, log_probs, rows = ids, [], [], []
        turns = random.randint(1, 3)
        for turn in range(turns):
            output = await self.server_manager.generate(
                request_id=f"{random.random()}", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 3}
            )
            ids = ids + output.token_ids
            mask += [1] * 3
            log_probs += output.log_probs
            last = turn + 1 == turns
            if last or self.several:
                rows.append(
                    AgentLoopOutput(
                        prompt_ids=start, response_ids=ids[len(start) :], response_mask=mask,
                        response_logprobs=log_probs,
                        num_turns=turn + 1, metrics=AgentLoopMetrics(), extra_fields=dict(output.extra_fields),
                    )
                )  # fmt: skip
            answer = self.tokenizer.encode(random.choice(["<A", "<B"]))
            ids = ids + answer
            if self.several:
                start, mask, log_probs = ids, [], []
            else:
                mask += [0] * len(answer)
                log_probs += [0.0] * len(answer)
        return rows if self.several else rows[0]


@register("steps")
class Steps(Turns):
    several = True


_infer_batch, _train_mini_batch = TrainingWorker.infer_batch, TrainingWorker.train_mini_batch


@functools.wraps(_infer_batch)
def infer_batch(self, data):
    output = _infer_batch(self, data)
    self.answered = list(output.keys())
    return output


@functools.wraps(_train_mini_batch)
def train_mini_batch(self, data):
    """Workers write the rows that they update on, as they get them, and what else than log-probs the forward gave."""
    count = self.__dict__.setdefault("updates", itertools.count(1))
    rows = {name: data[name] for name in KEPT if name in data}  # a TensorDict's
    rows = {k: [x.clone() for x in v.unbind()] if isinstance(v, torch.Tensor) else list(v) for k, v in rows.items()}
    found = {"rows": rows, "names": list(data.keys()), "answered": self.answered}
    torch.save(found, FOLDER / f"update-{next(count)}-{dist.get_rank()}.pt")
    return _train_mini_batch(self, data)


TrainingWorker.infer_batch, TrainingWorker.train_mini_batch = infer_batch, train_mini_batch
