"""TRL's tool loop with turns that a test writes: a tokenizer of Qwen's template, an environment, and a trainer."""

import functools
import json
from typing import Any

import tiny_trl as tt
from trained_tokenizers import learnt
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer, chat_template_utils


class Walk:
    """Walks along a line; says where it is, and logs what it knows of each step."""

    logs = True

    def reset(self, **_: Any) -> str:
        self.place = 0
        if self.logs:
            self.step_rewards, self.observations, self.actions = [], ["at 0"], []
        return "at 0"

    def move(self, direction: str) -> str:
        """
        Takes one step.

        Args:
            direction: north or south.

        Returns:
            Where that led.
        """
        self.place += 1 if direction == "north" else -1
        self._log(direction)
        return f"at {self.place}"

    def _log(self, direction: str) -> None:
        if self.logs:
            self.step_rewards.append(float(self.place))
            self.actions.append(direction)
            self.observations.append(f"at {self.place}")


class Silent(Walk):
    logs = False


@functools.cache
def tokenizer() -> Any:
    """Qwen's template, and pieces learnt from it: its description of tools would be a thousand bytes by itself."""
    template = chat_template_utils.qwen3_chat_template
    inner = learnt([template], ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], vocab_size=900)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    made.chat_template = template
    return made


def call(name: str, **arguments: Any) -> str:
    """One tool call; several may follow each other."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"


def answer(text: str) -> str:
    return f"{text}<|im_end|>"


class Writing(GRPOTrainer):  # type: ignore[misc]
    """Turns are not generated: scripts[i] has those of row i, all but its last with a call."""

    scripts: Any = ()
    left: Any = ()

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        rows = [turns for turns in self.left if turns]
        if not rows:  # another batch
            self.left = rows = [list(turns) for turns in self.scripts]
        assert len(rows) == len(prompt_ids)
        texts = [turns.pop(0) for turns in rows]
        texts = [text + "<|im_end|>" if text.endswith("</tool_call>\n") else text for text in texts]
        return [self.processing_class(text)["input_ids"] for text in texts], None


class Scripted(tt.Keeping, Writing):  # type: ignore[misc]
    """BiPACE's trainer on such turns."""


def make(folder: Any, environment: Any, cls: Any = Scripted, **options: Any) -> Any:
    made, tools = tokenizer(), {} if environment is None else {"environment_factory": environment}
    model = tt.make_model(vocab_size=len(made), max_position_embeddings=1024, eos_token_id=made.eos_token_id)
    rewards = [lambda completions, **_: [float(i) for i in range(len(completions))]]
    if environment is not None:
        rewards = [lambda environments, **_: [float(e.place > 0) for e in environments]]
    settings = {"reward_funcs": rewards, "max_completion_length": 250, "max_tool_calling_iterations": 3, **tools}
    return tt.make_trainer(folder, cls=cls, model=model, processing_class=made, **{**settings, **options})
