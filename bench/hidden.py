"""`python -m bench hidden [--out DIR]`: the cost of hidden states in a forward that a trainer runs anyway.

ABOUT says what is compared.  On the CPU, with a decoder of random weights: its work does not depend on them.
"""

import gzip
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import bipace_kernels as bk
from bipace_kernels.support import optional

from .measure import Effort, Side, compare, high_water, threads
from .report import SAMPLE, about, page, parser, publish, table

Tensor = torch.Tensor

PAPER_EXTRACTION, PAPER_STEP = 40.21, 361.27  # seconds of the paper's 7B run: extraction of hidden states, whole step
LAYER = -8
CHARACTERS_PER_TOKEN = 4  # what byte-pair tokenizers make of such English text, roughly; the text itself is not run
ABOUT = """\
One decoder of the Qwen2 architecture with random weights on this CPU, float32, sdpa attention.  Both sides of a row
take turns in one process; medians.

- **tap**: the log-prob forward (all blocks, head, log-softmax of the response tokens) with `bk.hidden.tap(layer=-8)`
  around it, against the same forward without.
- **early exit**: `bk.hidden.extract(layer=-8)` against a forward with `output_hidden_states=True` from which the rows
  are picked, on prompts of equal lengths and on prompts as long as those of recorded rollouts (ALFWorld, scripted
  policy: the first steps of one prompt group, task and latest observations, four characters to a token).  Memory is the
  process's highest resident size in a call less that before it, weights not counted; prompts of equal lengths are also
  taken as many at a time as trainers take.
- **calibration**: one forward with taps on all blocks and all poolings against the same forward without.
"""


@dataclass(frozen=True)
class Shape:
    """Size of the model and of what runs through it."""

    width: int = 768
    intermediate: int = 4480
    heads: int = 6
    kv_heads: int = 2
    blocks: int = 28
    vocabulary: int = 65_536  # the head is about an eighth of the model, as in Qwen2.5-1.5B
    rows: int = 4
    prompt: int = 160
    micro_batch: int = 16  # prompts of one forward in most of verl-agent's examples; memory is compared on as many
    response: int = 96
    recorded_steps: int = 3  # of each rollout of the group
    recorded_rollouts: int = 8

    def parameters(self) -> int:
        """Weights that a token is multiplied with, the head included."""
        head = self.width // self.heads
        block = self.width * (2 * self.width + 2 * self.kv_heads * head + 3 * self.intermediate)
        return self.blocks * block + self.width * self.vocabulary

    def text(self) -> str:
        return f"{self.blocks} blocks of width {self.width:,}, MLP {self.intermediate:,}, {self.vocabulary:,} tokens"


TINY = Shape(width=48, intermediate=96, heads=4, blocks=12, vocabulary=211, rows=2, prompt=12, micro_batch=3,
             response=8,
             recorded_steps=2, recorded_rollouts=3)  # fmt: skip


def make(shape: Shape) -> Any:
    """The decoder, in eval mode."""
    transformers = importlib.import_module("transformers")
    config = transformers.Qwen2Config(
        hidden_size=shape.width, intermediate_size=shape.intermediate, num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocabulary,
        max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config).eval()


def recorded_prompts(shape: Shape, path: Path) -> tuple[Tensor, Tensor, str]:
    """[B, T] ids and mask of the first steps of one recorded prompt group, left-padded, and what they are."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    task = records[0]["task_id"]
    mine = [r for r in records if r["task_id"] == task]
    rollouts = sorted({r["rollout"] for r in mine})[: shape.recorded_rollouts]
    texts = []
    for rollout in rollouts:
        steps = sorted((r for r in mine if r["rollout"] == rollout), key=lambda r: r["step"])[: shape.recorded_steps]
        texts += [step["task"] + " ".join(s["observation"] for s in steps[: i + 1]) for i, step in enumerate(steps)]
    prompts = [_tokens(text, shape.vocabulary) for text in texts]
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.int64), torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    padding = 1 - sum(map(len, prompts)) / ids.numel()
    return ids, mask, f"{len(prompts)} prompts, {len(set(texts))} distinct, {padding:.0%} of the tensor is padding"


def _tokens(text: str, vocabulary: int) -> Tensor:
    """Ids that are equal where pieces of the text are."""
    pieces = [text[i : i + CHARACTERS_PER_TOKEN] for i in range(0, len(text), CHARACTERS_PER_TOKEN)]
    return torch.tensor([1 + int.from_bytes(piece.encode()[:8], "little") % (vocabulary - 1) for piece in pieces])


def log_prob_forward(model: Any, shape: Shape, ids: Tensor) -> Callable[[], Tensor]:
    """What a trainer runs anyway: log-probabilities of the response tokens."""
    mask = torch.ones_like(ids)

    def log_probs() -> Tensor:
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, use_cache=False).logits[:, shape.prompt - 1 : -1]
            return torch.log_softmax(logits, -1).gather(-1, ids[:, shape.prompt :, None])

    return log_probs


def tapped(model: Any, shape: Shape, log_probs: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same forward with a tap on the last prompt token."""

    def call() -> Tensor:
        with bk.hidden.tap(model, layer=LAYER, positions=shape.prompt - 1) as kept:
            log_probs()
        return kept.rows()

    return call


def picked(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The paper's way: every hidden state, of which the last token's of one layer is kept."""
    with torch.no_grad():
        states = model(ids, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states
        last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
        kept: Tensor = states[LAYER][torch.arange(len(ids), device=ids.device), last]
        return kept


def difference(found: Tensor, want: Tensor) -> float:
    """Largest difference between unit rows."""
    unit = torch.nn.functional.normalize
    return float((unit(found.double(), dim=-1) - unit(want.double(), dim=-1)).abs().max())


class Bench:
    """The model and what was measured with it."""

    def __init__(self, shape: Shape, rollouts: Path, effort: Effort, tick: Callable[[], None]) -> None:
        self.shape, self.rollouts, self.effort, self.tick = shape, rollouts, effort, tick
        self.model = make(shape)
        self.rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        self.tap()
        ids, mask, note = self._equal(self.shape.micro_batch)
        note = f"{_memory(*sides(self.model, ids, mask))} with {note}"
        self.early_exit("early exit, equal lengths", *self._equal(self.shape.rows), wanted=1.25, more=f"; {note}")
        ids, mask, note = recorded_prompts(self.shape, self.rollouts)
        self.early_exit("early exit, recorded lengths", ids, mask, note, wanted=1.5)
        self.calibration()
        return self.rows

    def _equal(self, rows: int) -> tuple[Tensor, Tensor, str]:
        shape = self.shape
        ids = torch.randint(1, shape.vocabulary, (rows, shape.prompt), generator=torch.Generator().manual_seed(1))
        return ids, torch.ones_like(ids), f"{rows} distinct prompts of {shape.prompt} tokens"

    def tap(self) -> None:
        shape = self.shape
        ids = torch.randint(
            1, shape.vocabulary, (shape.rows, shape.prompt + shape.response), generator=torch.Generator().manual_seed(2)
        )
        log_probs = log_prob_forward(self.model, shape, ids)
        with_tap = tapped(self.model, shape, log_probs)

        def judge(ratio: float) -> tuple[str, str, bool]:
            extra, share = ratio - 1, PAPER_EXTRACTION / PAPER_STEP
            note = (
                f"{shape.rows} rows of {shape.prompt} + {shape.response} tokens; the tap adds {extra:+.2%}. Where the "
                f"log-prob forward costs what the paper's extraction does ({share:.1%} of a step), "
                f"{extra * share:+.2%} of a step instead of {share:.1%}"
            )
            return note, "at most 1 % more", extra <= 0.01

        prompts = ids[:, : shape.prompt]
        apart = difference(with_tap(), picked(self.model, prompts, torch.ones_like(prompts)))
        self._add("tap", ("tapped", "plain"), with_tap, log_probs, apart, judge)

    def early_exit(self, name: str, ids: Tensor, mask: Tensor, note: str, wanted: float, more: str = "") -> None:
        ours, theirs = sides(self.model, ids, mask)
        note += f"; memory at its highest {_memory(ours, theirs)}{more}"
        names = "bk.hidden.extract", "output_hidden_states=True, then pick"
        self._add(name, names, ours, theirs, difference(ours(), theirs()), lambda ratio: (
            note, f"{wanted}× as fast", ratio <= 1 / wanted))  # fmt: skip

    def calibration(self) -> None:
        ids, mask, note = self._equal(self.shape.rows)
        layers = [f"block {i}" for i in range(self.shape.blocks)]

        def plain() -> None:
            with torch.no_grad():
                self.model(ids, attention_mask=mask, use_cache=False)

        def tapped() -> Tensor:
            with bk.hidden.tap(self.model, layers=layers, pooling=("last", "mean", "attention")) as kept:
                plain()
            return kept.rows(f"block {self.shape.blocks + LAYER}", "last")

        apart = difference(tapped(), picked(self.model, ids, mask))
        self._add("calibration", ("taps on all blocks, three poolings", "plain"), tapped, plain, apart, lambda ratio: (
            f"{note}; adds {ratio - 1:+.1%}", "at most 20 % more", ratio <= 1.2))  # fmt: skip

    def _add(
        self, name: str, sides: tuple[str, str], ours: Callable[[], Any], theirs: Callable[[], Any], apart: float,
        judge: Callable[[float], tuple[str, str, bool]],
    ) -> None:  # fmt: skip
        """Times both sides; `apart` is the largest difference of a unit row; `judge` has the note, what was wanted and
        whether it was reached, of ours / theirs."""
        timed = [Side(side, lambda _, call=call: call()) for side, call in zip(sides, (ours, theirs), strict=True)]
        mine, other = compare(timed, self.effort, tick=self.tick).values()
        row = {"name": name, "ours": sides[0], "theirs": sides[1], "ours_ms": mine.median, "theirs_ms": other.median}
        row |= {"ours_cpu_ms": mine.cpu_median, "theirs_cpu_ms": other.cpu_median}
        judged = dict(zip(("note", "wanted", "reached"), judge(mine.median / other.median), strict=True))
        self.rows.append({**row, "rounds": min(mine.rounds, other.rounds), "difference": apart, **judged})


def sides(model: Any, ids: Tensor, mask: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Early exit, and the paper's way."""
    return (lambda: bk.hidden.extract(model, ids, mask, layer=LAYER, progress=False), lambda: picked(model, ids, mask))


def _memory(ours: Callable[[], Any], theirs: Callable[[], Any]) -> str:
    mine, other = (high_water(call) / 2**20 for call in (ours, theirs))
    return f"{mine:,.0f} MiB against {other:,.0f} MiB ({mine / other:.1%})"


_COLUMNS = {
    "what": "{name}", "ours": "{ours}", "ms": "{ours_ms:,.4g}", "CPU ms": "{ours_cpu_ms:,.4g}", "against": "{theirs}",
    "its ms": "{theirs_ms:,.4g}", "its CPU ms": "{theirs_cpu_ms:,.4g}",
    "theirs / ours": lambda row: f"{row['theirs_ms'] / row['ours_ms']:.3f}", "rounds": "{rounds}",
    "wanted": lambda row: f"{row['wanted']}: {'reached' if row['reached'] else 'missed'}",
    "largest difference": "{difference:.1e}", "note": "{note}",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows the table, writes hidden.json and hidden.md."""
    for package in ("rich", "transformers"):
        optional.need(package, "bench hidden")
    from rich.console import Console
    from rich.progress import Progress

    title = "What hidden states cost"
    options = parser("hidden", f"{title}, on the CPU.", writes="hidden.json and hidden.md", quick="a tiny model")
    options.add_argument("--rounds", type=int, default=7, metavar="N", help="calls of each side (%(default)s)")
    options.add_argument("--threads", type=int, default=2, metavar="N", help="of torch (%(default)s)")
    options.add_argument("--rollouts", type=Path, default=SAMPLE, metavar="FILE", help="of the recorded prompt lengths")
    arguments = options.parse_args(argv)
    if not arguments.rollouts.is_file():
        options.error(f"--rollouts: there is no {arguments.rollouts}; pass a .jsonl.gz file of rollouts")
    quick, shape = arguments.quick, TINY if arguments.quick else Shape()
    effort = Effort(rounds=2 if quick else arguments.rounds, seconds=90.0, fewest=3)
    with threads(arguments.threads) as on, Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("calls", total=8 * (effort.rounds + 1))
        rows = Bench(shape, arguments.rollouts, effort, lambda: bar.advance(task)).run()
    small = " A tiny model: shows that it runs, not how fast; nothing is reached or missed." if quick else ""
    text = page(title, about(on), shape.text() + "." + small, ABOUT, table(_COLUMNS, rows), "On a GPU: not measured.")
    document = {"schema": 1, "machine": on, "shape": asdict(shape), "quick": quick, "rows": rows}
    publish("hidden", document, text, arguments.out)
    return 0
