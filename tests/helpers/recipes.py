"""The code of docs/other_trainers.md, and made-up rollouts for it."""

import re

import numpy as np
import torch
from paths import ROOT
from trained_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast

import bipace_kernels as bk

ROOMS = ("kitchen with a stove", "dark hall, four doors", "garden; nobody is there")
ACTIONS = ("go", "open drawer 2", "take a red mug out of the box below the window")  # much shorter and longer ones
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<|endoftext|>")


def run(page, title):
    """The names that the code of a page's section defines, after that of its beginning."""
    whole, names = (ROOT / page).read_text(), {"tokenizer": TOKENIZER}
    for text in (whole, whole.split(f"## {title}\n")[1].split("\n## ")[0]):
        exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)
    return names


class Rollouts:
    """Two prompt groups of three trajectories, without an action from `silent` on; the last step has the reward."""

    def __init__(self, room="You: {}.", action="<action>{}</action>", silent=5):
        rng = np.random.default_rng(0)
        self.group, self.trajectory, self.step, self.reward, self.room, self.action = [], [], [], [], [], []
        for t in range(6):
            length = int(rng.integers(2, 4)) if t < silent else 1
            for i in range(length):
                self.group.append(t // 3)
                self.trajectory.append(t)
                self.step.append(i)
                self.reward.append(float(rng.integers(1, 9)) if i + 1 == length else 0.0)
                seen = room.format(ROOMS[rng.integers(3)])
                self.room.append(seen if t < silent else self.room[-1])  # a state that others in its group have seen
                self.action.append(action.format(ACTIONS[rng.integers(3)]) if t < silent else "")
        self.prompts = [TOKENIZER.encode(room) for room in self.room]
        self.responses = [TOKENIZER.encode(action) for action in self.action]
        self.last = [i + 1 == len(self.step) or self.step[i + 1] == 0 for i in range(len(self.step))]

        self.outcomes = [r for r, last in zip(self.reward, self.last, strict=True) if last]  # of the trajectories
        pairs = list(zip(self.trajectory, self.prompts, self.responses, strict=True))
        self.rows = [[(p, r) for t, p, r in pairs if t == wanted] for wanted in range(6)]

    def advantage(self, texts=None, keys=None):
        states = bk.ngram_fingerprint(self.room if texts is None else texts)
        keys = bk.action_keys(self.action)[0] if keys is None else keys
        columns = {"step": self.step, "fingerprint": states, "action_key": keys, "config": bk.Config.bipace(0.25)}
        return bk.advantage(self.group, self.trajectory, self.reward, **columns).advantage


def padded(rows, pad=0, room=0):
    """[B, T] ids of rows of pairs, one behind the other their prompts and responses, and 1 on the latter."""
    ids = [[i for p, r in pairs for i in p + r] for pairs in rows]
    masks = [[bit for p, r in pairs for bit in [0] * len(p) + [1] * len(r)] for pairs in rows]
    width = max(map(len, ids)) + room
    filled = (ids, pad), (masks, 0)
    return (torch.tensor([row + [empty] * (width - len(row)) for row in each]) for each, empty in filled)


def check_tokens(rollouts, found, wanted=None):
    """found [B][T]: the advantage of each turn on its tokens, 0 elsewhere."""
    values = iter((rollouts.advantage() if wanted is None else wanted).tolist())
    for row, pairs in zip(found, rollouts.rows, strict=True):
        tokens = []
        for prompt, response in pairs:
            tokens += [0.0] * len(prompt) + [next(values)] * len(response)
        torch.testing.assert_close(torch.tensor(row[: len(tokens)]), torch.tensor(tokens), atol=1e-6, rtol=0)
        assert not any(row[len(tokens) :])
