"""Rivals of the package's estimators in training: GAE over a value that a user could write down in an hour.

step-means   a mean for each prompt and step (baselines.py)
trees        scikit-learn's ExtraTrees on the batch's hidden states (baselines.py)
value-head   PPO's value head: two layers on the hidden states, trained along with the policy on the batches before

Hidden states are those that BiPACE and `Config.gae("kernel")` can read: `settings.layer`, before each command.  Value
and policy share no gradient: the head learns from detached states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import baselines
import numpy as np
import torch
from numpy.typing import NDArray
from rollout import Episode
from settings import Settings

HEAD_WIDTH = 64
HEAD_EPOCHS = 4  # over a batch, as PPO's
HEAD_BATCH = 64  # records


class Credit(Protocol):
    """Advantages of each command of each episode, as trainer.train() asks for them.  A state is kept in checkpoints."""

    def __call__(self, model: Any, tokenizer: Any, episodes: Sequence[Episode], update: int) -> list[list[float]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Rival(ABC):
    """Batches as arrays, GAE over `value()` of them."""

    reads_states = False

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings, self.seed = settings, seed

    def __call__(self, model: Any, tokenizer: Any, episodes: Sequence[Episode], update: int) -> list[list[float]]:
        lengths = [len(episode.commands) for episode in episodes]
        trajectory = np.repeat(np.arange(len(episodes)), lengths)
        prompts: dict[tuple[int, ...], int] = {}
        group = np.array([prompts.setdefault(tuple(episode.prompt_ids), len(prompts)) for episode in episodes])[
            trajectory
        ]
        step = np.concatenate([np.arange(n) for n in lengths])
        reward = np.concatenate([np.asarray(episode.rewards, dtype=np.float64) for episode in episodes])
        returns = baselines.gae(reward, np.zeros(len(reward)), trajectory, gamma=self.settings.gamma, gae_lambda=1.0)
        states = None
        if self.reads_states:
            states = states_before_commands(model, episodes, self.settings.layer, self.settings.micro_batch)
        value = self.value(states, returns, group, step, update)
        advantage = baselines.gae(
            reward, value, trajectory, gamma=self.settings.gamma, gae_lambda=self.settings.gae_lambda
        )
        return [part.tolist() for part in np.split(advantage, np.cumsum(lengths)[:-1])]

    @abstractmethod
    def value(
        self, states: Any, returns: baselines.Floats, group: baselines.Integers, step: baselines.Integers, update: int
    ) -> baselines.Floats:
        """[N] V̂ of the states before the commands."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  most rivals keep nothing
        pass


class StepMeans(Rival):
    def value(self, states: Any, returns: Any, group: Any, step: Any, update: int) -> baselines.Floats:
        return baselines.step_means(returns, group, step, self.settings.shrinkage)


class Trees(Rival):
    reads_states = True

    def value(self, states: Any, returns: Any, group: Any, step: Any, update: int) -> baselines.Floats:
        return baselines.extra_trees(
            states, returns, group, step, leaf=self.settings.leaf, seed=1000 * self.seed + update
        )


class ValueHead(Rival):
    """V̂ of a batch by the head as the batches before left it; then the head takes some steps towards the batch's
    returns.

    States are scaled by the mean and the standard deviation of the first batch.
    """

    reads_states = True

    def __init__(self, settings: Settings, seed: int) -> None:
        super().__init__(settings, seed)
        self.head: Any = None

    def value(self, states: Any, returns: Any, group: Any, step: Any, update: int) -> baselines.Floats:
        if self.head is None:
            self._begin(states.shape[1])
            self.mean, self.scale = states.mean(axis=0), np.maximum(states.std(axis=0), 1e-6)
        seen = torch.from_numpy(((states - self.mean) / self.scale).astype(np.float32))
        with torch.no_grad():
            value: baselines.Floats = self.head(seen)[:, 0].double().numpy()
        wanted = torch.from_numpy(returns.astype(np.float32))
        rng = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + update)
        with torch.enable_grad():
            for _ in range(HEAD_EPOCHS):
                for rows in torch.randperm(len(seen), generator=rng).split(HEAD_BATCH):
                    self.optimizer.zero_grad()
                    torch.nn.functional.mse_loss(self.head(seen[rows])[:, 0], wanted[rows]).backward()
                    self.optimizer.step()
        return value

    def _begin(self, width: int) -> None:
        """A head whose first values are 0; it takes no random numbers of the run's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.head = torch.nn.Sequential(
                torch.nn.Linear(width, HEAD_WIDTH), torch.nn.Tanh(), torch.nn.Linear(HEAD_WIDTH, 1)
            )
        torch.nn.init.zeros_(self.head[2].weight)
        torch.nn.init.zeros_(self.head[2].bias)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=self.settings.value_rate)

    def state_dict(self) -> dict[str, Any]:
        if self.head is None:
            return {}
        parts = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**parts, "mean": torch.from_numpy(self.mean), "scale": torch.from_numpy(self.scale)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._begin(len(state["mean"]))
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.mean, self.scale = state["mean"].numpy(), state["scale"].numpy()


CREDITS: dict[str, type[Rival]] = {"step-means": StepMeans, "trees": Trees, "value-head": ValueHead}


@torch.inference_mode()
def states_before_commands(model: Any, episodes: Sequence[Episode], layer: int, rows: int) -> NDArray[np.float32]:
    """[commands of all episodes, D] hidden_states[layer] at the position before each command's first token."""
    was_training = model.training
    model.eval()
    found = []
    for begin in range(0, len(episodes), rows):
        part = episodes[begin : begin + rows]
        whole = [[*episode.prompt_ids, *episode.ids] for episode in part]
        longest = max(map(len, whole))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in whole], device=model.device)
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[layer]  # causal: padding is never read
        for at, episode in enumerate(part):
            first = [i for i, own in enumerate(episode.own) if own and not (i and episode.own[i - 1])]
            found.append(states[at, [len(episode.prompt_ids) + i - 1 for i in first]].float().cpu().numpy())
    model.train(was_training)
    return np.concatenate(found)
