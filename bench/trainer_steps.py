"""`python -m bench trainer_steps [--quick] [--out DIR]`: a whole step of TRL with BiPACE, against stock GRPO, and the
calculation of verl's step.  Needs TRL and verl.
"""

import importlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch

from bipace_kernels import hidden

from .measure import threads
from .report import about, page, parser, publish, table
from .trainers import Batch, byte_tokenizer, spelt, verl_sides, versions

Tensor = torch.Tensor

ABOUT = """\
Two trainers, stock GRPOTrainer and BiPACEGRPOTrainer, train the same model on the same rollouts and take turns step by
step (A B, B A, A B, …).  A step is all from the rollouts to the optimizer: scoring, advantages, forwards, backward,
update.  What rollouts cost is not in it: they are made up, so shares of a step with generation are smaller.  CPU time
of the thread that trains, one thread.  Added: mean over pairs of ours / stock − 1, with a 95 % interval (bootstrap over
pairs; first pair left out). Steps of equal work differ by several per cent, so this cannot resolve 1 %.  **In its own
code** can: the CPU time of the same steps that was spent in the adapter (from rollouts to records, hidden states or
n-grams, advantages, metrics, a forward of its own), divided by stock's mean step.  It leaves out only the hook that
copies rows of hidden states during a forward.

**verl's rows are not a step of verl's**, which needs Ray and its workers: a plain loop in one process does what its
actor computes (the old log-probs' forward, advantages by verl's `compute_advantage()`, one update of the whole batch in
float32). BiPACE adds to it a tap in the old log-probs' forward and its estimator, both as the adapter has them; moving
states from workers to the driver is not in it.
"""
WAYS: dict[str, dict[str, Any]] = {
    "TRL's defaults: the loss's forward is tapped": {},
    "num_iterations=2: the old log-prob forward is tapped": {"num_iterations": 2},
    "gradient_accumulation_steps=2: a forward that ends early": {"gradient_accumulation_steps": 2},
    "the same with n-grams of the observations": {"gradient_accumulation_steps": 2, "bipace_embedder": "ngram"},
    "gae, TRL's defaults: the loss's forward is tapped": {"bipace_method": "gae"},
    "gae, gradient_accumulation_steps=2: n-grams of three turns": {
        "gradient_accumulation_steps": 2,
        "bipace_method": "gae",
    },
}
VERL = {"verl's calculation": "bipace", "verl's calculation, gae": "gae"}


@dataclass
class Row:
    """CPU seconds of a step, medians; added, own: shares of stock's, [mean, low, high]; own: in BiPACE's code."""

    way: str
    stock_s: float
    ours_s: float
    added: tuple[float, float, float]
    own: tuple[float, float, float]
    pairs: int


@dataclass(frozen=True)
class Size:
    prompts: int = 4
    rollouts: int = 8
    turns: int = 6
    width: int = 96
    blocks: int = 12  # of which layer −4 leaves nine, as −8 leaves 21 of 28


def rollout_of(size: Size, tokenizer: Any) -> Any:
    """A rollout_func: thinking and an action in each turn, a short answer in between."""

    def ids_of(text: Any) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rng = random.Random(trainer.state.global_step)
        columns = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "step_rewards")
        out: dict[str, list[Any]] = {name: [] for name in columns}
        for prompt in prompts:
            ids: list[int] = []
            mask: list[int] = []
            for _ in range(size.turns):
                turn = ids_of(f"so {rng.random():.3f}<action>{rng.choice(['go', 'look', 'wait'])}</action>")
                answer = ids_of(rng.choice([" a door", " a wall"]))
                ids += turn + answer
                mask += [1] * len(turn) + [0] * len(answer)
            rewards = [float(rng.random() < 0.3) for _ in range(size.turns)]
            for name, cell in zip(columns, (ids_of(prompt), ids, [0.0] * len(ids), mask, rewards), strict=True):
                out[name].append(cell)
        return out

    return rollout


class Turnstile:
    """Lets two threads take turns: first 0, 1, then 1, 0, then 0, 1, ..."""

    def __init__(self) -> None:
        self.passed, self.gone, self.changed = 0, False, threading.Condition()

    def enter(self, who: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.gone or ((self.passed + 1) // 2 % 2) == who)

    def leave(self, gone: bool = False) -> None:
        with self.changed:
            self.passed, self.gone = self.passed + 1, self.gone or gone
            self.changed.notify_all()


def tiny_model(size: Size) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=256, hidden_size=size.width, intermediate_size=4 * size.width, num_hidden_layers=size.blocks,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, pad_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


class OwnTime:
    """CPU seconds of a thread inside the functions that it wraps, since the last take()."""

    def __init__(self) -> None:
        self.spent, self.inside = 0.0, False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside, begun = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside, self.spent = False, self.spent + time.thread_time() - begun

        return timed

    def take(self) -> float:
        spent, self.spent = self.spent, 0.0
        return spent


def row_of(way: str, stock: Tensor, ours: Tensor, own: Tensor) -> Row:
    """From the CPU seconds [pairs] of each."""
    pairs = len(stock)
    drawn = torch.randint(pairs, (10_000, pairs), generator=torch.Generator().manual_seed(0))

    def interval(mean: Tensor, draws: Tensor) -> tuple[float, float, float]:
        low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return float(mean), low, high

    ratio = ours / stock - 1
    return Row(
        way, float(stock.median()), float(ours.median()), interval(ratio.mean(), ratio[drawn].mean(1)),
        interval(own.mean() / stock.mean(), own[drawn].mean(1) / stock[drawn].mean(1)), pairs,
    )  # fmt: skip


def measure(way: str, size: Size, pairs: int) -> Row:
    """Both trainers on one configuration; a pair is as many steps as TRL learns from one batch."""
    trl, adapter = importlib.import_module("trl"), importlib.import_module("bipace_kernels.integrations.trl")
    transformers, datasets = importlib.import_module("transformers"), importlib.import_module("datasets")
    tokenizer, turnstile = byte_tokenizer(), Turnstile()
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    options, rows = dict(WAYS[way]), size.prompts * size.rollouts
    cycle, accumulated = options.get("num_iterations", 1), options.get("gradient_accumulation_steps", 1)
    seconds: tuple[list[float], list[float]] = ([], [])
    own_seconds: list[float] = []
    own_time = OwnTime()
    of_adapter = importlib.import_module("bipace_kernels.integrations.trl.trainer")

    class Ours(adapter.BiPACEGRPOTrainer):  # type: ignore[misc, name-defined]
        def _bipace_credit(self, *args: Any) -> Any:
            return own_time.wrap(super()._bipace_credit)(*args)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def __init__(self, who: int) -> None:
            self.who, self.begun = who, 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turnstile.enter(self.who)
            self.begun = time.thread_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds[self.who].append(time.thread_time() - self.begun)
            if self.who:
                own_seconds.append(own_time.take())
            turnstile.leave()

    def trainer_of(who: int, folder: str) -> Any:
        own = {"bipace_method": "bipace", "bipace_layer": -4, **options}
        own = {name: value for name, value in own.items() if who or not name.startswith("bipace")}
        args = (adapter.BiPACEGRPOConfig if who else trl.GRPOConfig)(
            output_dir=folder, per_device_train_batch_size=rows // accumulated, num_generations=size.rollouts,
            bf16=False,
            max_steps=(pairs + 1) * cycle, max_completion_length=512, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, logging_strategy="no", gradient_checkpointing=False, **own,
        )  # fmt: skip
        trainer = (Ours if who else trl.GRPOTrainer)(
            tiny_model(size), [lambda completions, **_: [float(len(c) % 3) for c in completions]], args,
            train_dataset=datasets.Dataset.from_dict({"prompt": [f"task {i}" for i in range(size.prompts)]}),
            processing_class=tokenizer, rollout_func=rollout_of(size, tokenizer), callbacks=[Clock(who)],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    errors: list[BaseException] = []

    def train(trainer: Any) -> None:
        try:
            trainer.train()
        except BaseException as error:
            errors.append(error)
        finally:
            turnstile.leave(gone=True)

    wrapped = {name: own_time.wrap(getattr(of_adapter, name)) for name in ("prepare", "early_exit")}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(of_adapter, **wrapped):
        # Made one after the other: accelerate resets a state that all trainers of a process share.
        both = [threading.Thread(target=train, args=(trainer_of(who, folder),)) for who in (0, 1)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    if errors:
        raise errors[0]
    found = (torch.tensor(s, dtype=torch.float64) for s in (*seconds, own_seconds))
    return row_of(way, *(s.reshape(-1, cycle).sum(1)[1:] for s in found))


def measure_verl(way: str, size: Size, pairs: int) -> Row:
    """What verl's actor computes in a step, in a loop of our own, with verl's estimator grpo and with BiPACE's."""
    batch = Batch(way, size.prompts, size.rollouts, size.turns, size.width)
    model, data, tapped = tiny_model(size), batch.tensors(), None
    ids, length = torch.cat([data["prompts"], data["responses"]], 1), data["prompts"].shape[1]
    turns = importlib.import_module("bipace_kernels.integrations._turns").Turns.of(data["mask"]).positions(length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    sides = verl_sides(batch, byte_tokenizer(), VERL[way], lambda: tapped.rows())

    def log_probs() -> Tensor:
        found = model(ids[:, :-1]).logits[:, length - 1 :].log_softmax(-1)
        return found.gather(-1, ids[:, length:, None]).squeeze(-1)

    def step(who: int) -> tuple[float, float]:
        """CPU seconds of the step, and of its advantages."""
        nonlocal tapped
        rows, begun = sides[who].prepare(), time.thread_time()
        tapped = hidden.tap(model, -4, positions=turns) if who else None
        with torch.no_grad(), tapped or nullcontext():
            old = log_probs()
        asked = time.thread_time()
        advantages, mask = sides[who].call(rows).batch["advantages"], data["mask"]
        given = time.thread_time()
        loss = -((log_probs() - old).exp() * advantages * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - begun, given - asked

    seconds = torch.empty(pairs + 1, 2, 2, dtype=torch.float64)
    for pair in range(pairs + 1):
        for who in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[pair, who] = torch.tensor(step(who), dtype=torch.float64)
    (stock, ours), advantages = seconds[1:, :, 0].unbind(1), seconds[1:, :, 1]
    return row_of(way, stock, ours, advantages[:, 1] - advantages[:, 0])


_COLUMNS = {
    "configuration": "{way}", "stock, CPU s": "{stock_s:.3g}", "with BiPACE, CPU s": "{ours_s:.3g}",
    "in its own code": "{own[0]:.2%}", "95 % interval": "{own[1]:.2%} to {own[2]:.2%}",
    "added": "{added[0]:+.1%}", "its 95 % interval": "{added[1]:+.1%} to {added[2]:+.1%}", "pairs": "{pairs}",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows the table, writes steps.json and steps.md."""
    options = parser("trainer_steps", "A step of TRL with BiPACE, against stock GRPO.",
                     writes="steps.json and steps.md", quick="a tiny model, two pairs")  # fmt: skip
    options.add_argument("--pairs", type=int, default=20, metavar="N", help="pairs of steps (%(default)s)")
    arguments = options.parse_args(argv)
    size, pairs = (Size(2, 4, 2, 32), 2) if arguments.quick else (Size(), arguments.pairs)
    with threads(1) as on:
        of = versions()
        rows = [measure(way, size, pairs) for way in WAYS] + [measure_verl(way, size, pairs) for way in VERL]
    document = {"schema": 1, "machine": on, "versions": of, "size": asdict(size), "rows": [asdict(row) for row in rows]}
    sizes = (
        "{prompts} prompts of {rollouts} rollouts of {turns} turns; a random Qwen2 of {blocks} blocks of width "
        "{width}, in float32; method bipace where none is named, states after three quarters of the blocks."
    ).format(**asdict(size))
    title = "A step of TRL with BiPACE, against stock GRPO; verl's calculation"
    text = page(title, f"{spelt(of)}; {about(on)}", ABOUT, sizes, table(_COLUMNS, [asdict(row) for row in rows]))
    publish("steps", document, text, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
