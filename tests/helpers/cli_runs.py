"""The program as the tests of the command line run it, and records for it."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

from bipace_cli.commands import app
from typer.testing import CliRunner, Result

import bipace_kernels as bk


def run(*args: object) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def fail(*args: object) -> str:
    """The message of a run that must end with exit status 2, on one line."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def unpack(page: str) -> dict[str, Any]:
    """The data of an inspector's page."""
    packed = page.partition('<script id="data" type="application/gzip">')[2].partition("</script>")[0]
    return json.loads(gzip.decompress(base64.b64decode(packed)))  # type: ignore[no-any-return]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(rollout: int, step: int, observation: str, action: str, reward: float = 0.0, **more: Any) -> dict[str, Any]:
    ids = {"task_id": "key", "rollout": rollout, "step": step}
    return {**ids, "observation": observation, "action": action, "reward": reward, **more}


GOLDEN = [
    record(0, 0, "room", "go"),
    record(0, 1, "hall", "take", 1.0),
    record(1, 0, "room", "go"),
    record(1, 1, "roof", "look"),
    record(2, 0, "room", "WAIT "),
    record(2, 1, "hall", " take"),
]


#: What the program makes of a preset with n-grams.
PRESETS = {
    "grpo": bk.Config.grpo(),
    "gigpo": bk.Config.gigpo(),
    "hgpo": bk.Config.hgpo(),
    "bigpo": bk.Config.bigpo(0.25),
    "bipace": bk.Config.bipace(0.25),
    "gae": bk.Config.gae(embedder="ngram"),
}


def direct(path: Path, config: bk.Config, **arguments: Any) -> Any:
    """The same records through the package's functions."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    group = [row["task_id"] for row in rows]
    numbers = {task: number for number, task in enumerate(dict.fromkeys(group))}
    keys, parsed = bk.action_keys([row["action"] for row in rows], mode="text")
    ids = [numbers[task] for task in group]
    trajectory, rewards = bk.trajectory_ids(ids, [row["rollout"] for row in rows]), [row["reward"] for row in rows]
    arguments |= {"step": [row["step"] for row in rows], "truncated": [row.get("truncated", False) for row in rows]}
    return bk.advantage(ids, trajectory, rewards, action_key=keys, action_parsed=parsed, config=config, **arguments)


def observations(path: Path) -> list[str]:
    return [json.loads(line)["observation"] for line in path.read_text().splitlines()]
