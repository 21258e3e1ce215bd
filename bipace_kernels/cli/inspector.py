"""The credit inspector of `bipace report --html`: one HTML file that shows every step under every estimator.

The page needs no server and no network.  Its data is JSON, gzipped and in base64, so that no text of a rollout is
markup in the page; the script (templates/inspector.js) writes texts only as text, and the page's content security
policy forbids all other scripts and all requests.  docs/inspector.md
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import bipace_kernels as bk

from ..backends.schema import LIMIT
from ..config import PACE_ESTIMATORS
from ..diagnostics.kernel_value_r2 import nearest
from ..features.embedders import EMBEDDERS
from . import rollouts
from .advantage import BRANCHES, refused, shared_arguments

Ints = npt.NDArray[np.int64]

BYTES = 5_000_000  # of the page, with up to 10,000 records
BYTES_PER_RECORD = 500  # beyond those
SHORTEST = 200  # characters that a text keeps, however large the file
NAME = 120  # characters of task ids, rollout ids and file names
NEIGHBOURS = 8
TRAINED = "trained"  # the estimator and the partition that a training run recorded
REASONS = ("value", "returns", "delta", "step_term")  # of a training run with "gae": why a step got its advantage
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Part:
    """The records of one file, or of all files together, and the states that the cosine estimators compare.

    fingerprint   [N, D] of the observations, a row for each record
    embedder      its embedder, by the name of its row in EMBEDDERS
    epsilon       ε of cosine clusters
    """

    name: str
    records: rollouts.Rollouts
    fingerprint: torch.Tensor
    embedder: str
    epsilon: float


@dataclass(frozen=True)
class Row:
    """An estimator of the page.

    partition   the column of its clusters; "" for none
    """

    key: str
    label: str
    meaning: str
    partition: str
    config: bk.Config


def page(parts: Sequence[Part], options: SimpleNamespace) -> str:
    """The whole page."""
    content = collect(parts, options)
    limit = max(BYTES, BYTES_PER_RECORD * sum(len(part.records) for part in parts))
    texts: list[str] = content.pop("texts")
    cap = max(SHORTEST, max(map(len, texts), default=0))
    while True:
        cut = [{"start": text[:cap], "more": len(text) - cap} if len(text) > cap else text for text in texts]
        made = render(content | {"texts": cut})
        size = len(made.encode())
        if size < limit or cap == SHORTEST:
            return made
        cap = max(SHORTEST, int(0.9 * cap * limit / size))


def render(content: dict[str, Any]) -> str:
    """The page for the result of `collect()`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    script, style = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("inspector.js", "inspector.css"))
    packed = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return environment.get_template("inspector.html").render(
        title=", ".join(content["files"]),
        version=content["version"],
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        data=base64.b64encode(gzip.compress(packed, mtime=0)).decode(),
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def collect(parts: Sequence[Part], options: SimpleNamespace) -> dict[str, Any]:
    """What the page shows, as JSON: columns with an entry for each record, by prompt group, rollout and step.

    Numbers have four digits, but for totals.  `spread` is the estimators' disagreement: the largest minus the smallest
    A/rms(A), each rms over the part.  `neighbours` are the records of the same prompt group with the largest kernel k
    of "gae", as a training run recorded them if it did.
    """
    records = [part.records for part in parts]
    has_actions = all(r.action is not None for r in records)
    rows = _estimators(parts[0], options, has_actions)
    texts: dict[str, int] = {}
    trained = all(r.trained_advantage is not None and r.trained_cluster is not None for r in records)
    shown = [{"key": row.key, "label": row.label, "meaning": row.meaning, "partition": row.partition} for row in rows]
    if trained:
        shown.append({"key": TRAINED, "label": "as trained", "meaning": "what the trainer used", "partition": TRAINED})
    content: dict[str, Any] = {"groups": [], "rollouts": [], "columns": _columns([row["key"] for row in shown])}
    cosine = dict.fromkeys(f"cosine of {EMBEDDERS[part.embedder].label}, ε {part.epsilon:.3g}" for part in parts)
    partitions = [
        {"key": "exact", "label": "equal observations"},
        {"key": "history", "label": f"equal histories, up to {options.history_length + 1} observations"},
        {"key": "cosine", "label": "; ".join(cosine)},
        *([{"key": TRAINED, "label": "the trainer's own"}] if trained else []),
    ]
    content["columns"]["trained"] = {n: [] for n in REASONS if getattr(records[0], f"trained_{n}") is not None}
    for number, part in enumerate(parts):
        _add(content, texts, part, number, options, _estimators(part, options, has_actions))
    return {
        "version": bk.__version__,
        "gamma": options.gamma,
        "files": [_cut(part.name) for part in parts],
        "estimators": shown,
        "partitions": partitions,
        "branches": list(BRANCHES),
        "success_above": options.success_above if records[0].success is None else None,
        "neighbours": TRAINED if _recorded(records[0]) else "recomputed",
        "has_actions": has_actions,
        "action_tag": options.action_mode == "action_tag",
        **content,
        "texts": list(texts),
    }


def _columns(keys: Sequence[str]) -> dict[str, Any]:
    """Empty columns of all parts, an entry per record; those of estimators and partitions by their keys."""
    plain = "group rollout step line observation action reward returns value episode spread same_action"
    partitions = ["exact", "history", "cosine", *([TRAINED] if TRAINED in keys else [])]
    columns: dict[str, Any] = {name: [] for name in (*plain.split(), "neighbours", "kernel")}
    columns |= {name: {key: [] for key in keys} for name in ("advantage", "scaled", "branch")}
    return {**columns, "cluster": {key: [] for key in partitions}}


def _estimators(part: Part, options: SimpleNamespace, has_actions: bool) -> list[Row]:
    shared = {"gamma": options.gamma, "duplicates": options.duplicates, "on_invalid": options.on_invalid}
    depth, config = options.history_length, bk.Config
    similar, histories = "similar observations", f"equal histories of up to {depth + 1} observations"
    own, gae = f"the action's mean R against that of {similar}", config.gae(embedder=part.embedder, **shared)
    rows = [
        Row("grpo", "GRPO", "the rollout's total against its prompt group's", "", config.grpo(**shared)),
        Row("gigpo", "GiGPO", "R against equal observations", "exact", config.gigpo(**shared)),
        Row("hgpo", "HGPO", f"R against {histories}", "history", config.hgpo(depth, **shared)),
        Row("bigpo", "BiGPO", f"R against {similar}", "cosine", config.bigpo(part.epsilon, **shared)),
        Row("bipace", "BiPACE", own, "cosine", config.bipace(part.epsilon, **shared)),
        Row("gae", "GAE", "GAE(λ) over a value estimated from the batch by a kernel", "kernel", gae),
    ]
    return [row for row in rows if has_actions or row.config.estimator not in PACE_ESTIMATORS]


def _add(
    content: dict[str, Any], texts: dict[str, int], part: Part, number: int, options: Any, estimators: Sequence[Row]
) -> None:
    """Appends a part's records, groups and rollouts to the content, and new texts."""
    records, groups, paths, columns = part.records, content["groups"], content["rollouts"], content["columns"]
    shared = shared_arguments(records, options.action_mode, options.backend, options.threads)
    results = _results(part, shared, estimators)
    lay = shared["layout"].once() if options.duplicates == "once" else shared["layout"]
    order = lay.order.numpy()
    copy = np.zeros(len(order), bool) if lay.first is None else lay.first.numpy() < np.arange(len(order))
    first, first_group, files = len(columns["group"]), len(groups), records.file_names()

    known_groups: dict[int, int] = {}
    known_paths: dict[int, int] = {}
    for row, again in zip(order.tolist(), copy.tolist(), strict=True):
        group, trajectory = int(records.group[row]), int(records.trajectory[row])
        if group not in known_groups:
            known_groups[group] = len(groups)
            groups.append({"file": number, "task": _cut(str(records.task[row])), "rollouts": 0, "records": 0})
        at = known_groups[group]
        if trajectory not in known_paths:
            known_paths[trajectory] = len(paths)
            source = f"{_cut(files[records.file[row]])} " if records.merged else ""
            name = f"{source}{_cut(str(records.rollout[row]))}"
            paths.append({"group": at, "name": name, "total": 0.0, "success": None})
            groups[at]["rollouts"] += 1
        path = paths[known_paths[trajectory]]
        groups[at]["records"] += 1
        path["total"] += 0.0 if again else records.reward[row]  # as in R(τ)
        path["success"] = None if records.success is None else records.success[row]  # that of the last record
        columns["group"].append(at)
        columns["rollout"].append(known_paths[trajectory])
        columns["step"].append(records.step[row])
        columns["line"].append(records.line[row])
        columns["observation"].append(texts.setdefault(records.observation[row], len(texts)))
        action = "" if records.action is None else records.action[row]
        columns["action"].append(texts.setdefault(action, len(texts)))
        columns["reward"].append(_short(records.reward[row]))
    _finish(groups[first_group:], first_group, paths, options.success_above)

    columns["returns"] += _floats(results["grpo"].returns[order])
    columns["episode"] += _floats(results["grpo"].episode_advantage[order])
    columns["value"] += _floats(results["gae"].value[order])
    advantages = {row.key: results[row.key].advantage[order].double().numpy() for row in estimators}
    if TRAINED in columns["advantage"]:
        advantages[TRAINED] = np.array(records.trained_advantage, np.float64)[order]
        trained = np.array(records.trained_cluster)[order]
        if records.merged:  # each file numbers its own
            trained = np.where(trained < 0, -1, trained + np.array(records.file)[order] * (trained.max(initial=-1) + 1))
        columns["cluster"][TRAINED] += _renumbered(trained, columns["cluster"][TRAINED])
    scaled = {key: x / (math.sqrt(float(x @ x) / max(len(x), 1)) or 1.0) for key, x in advantages.items()}
    for key, values in advantages.items():
        columns["advantage"][key] += _floats(values)
        columns["scaled"][key] += _floats(scaled[key])
        columns["branch"][key] += results[key].branch[order].tolist() if key in results else [0] * len(order)
    several = np.stack(list(scaled.values()))
    columns["spread"] += _floats(several.max(axis=0) - several.min(axis=0))
    for name, of in (("exact", "gigpo"), ("history", "hgpo"), ("cosine", "bigpo")):
        columns["cluster"][name] += _renumbered(results[of].cluster[order].numpy(), columns["cluster"][name])
    actions = np.unique(shared.get("action_key", np.zeros(len(records))), return_inverse=True)[1].reshape(-1)
    columns["same_action"] += _renumbered(actions[order], columns["same_action"])
    for name, column in columns["trained"].items():
        column += _floats(np.array(getattr(records, f"trained_{name}"), np.float64)[order])
    of_row = {row: i for i, row in enumerate(order.tolist(), first)}
    if _recorded(records):
        starts = {file: row for row, file in reversed([*enumerate(records.file)])}  # blank lines are no rows
        of_file = {(records.file[row], row - starts[records.file[row]]): i for row, i in of_row.items()}
        near: Any = list(zip(records.trained_neighbours, records.trained_kernel, strict=True))  # type: ignore[arg-type]
        shown = [[of_file.get((records.file[row], other)) for other in near[row][0]] for row in order.tolist()]
    else:
        config = next(row.config for row in estimators if row.key == "gae")
        near = nearest(results["gae"], part.fingerprint, config, NEIGHBOURS)
        shown = [[of_row.get(other) for other in near[row][0]] for row in order.tolist()]
    for row, others in zip(order.tolist(), shown, strict=True):
        pairs = [(other, k) for other, k in zip(others, near[row][1], strict=False) if other is not None]
        columns["neighbours"].append([other for other, _ in pairs])
        columns["kernel"].append([_short(k) for _, k in pairs])


def _recorded(records: rollouts.Rollouts) -> bool:
    """Whether a training run recorded the neighbours, with their k."""
    return records.trained_neighbours is not None and records.trained_kernel is not None


def _results(part: Part, shared: dict[str, Any], estimators: Sequence[Row]) -> dict[str, Any]:
    results = {}
    for row in estimators:
        states: dict[str, Any] = {}
        if row.config.needs_fingerprint:
            states["fingerprint"] = part.fingerprint
        elif row.partition:
            states["observation"] = list(part.records.observation)
        with refused(part.records, f"{part.name}, {row.label}"):
            results[row.key] = bk.advantage(config=row.config, **shared, **states)
    return results


def _finish(groups: Sequence[dict[str, Any]], first: int, paths: Sequence[dict[str, Any]], above: float) -> None:
    """Totals of the rollouts; share of successes of the groups, and mean and standard deviation of their totals.

    above   a rollout without a recorded success succeeded if its total is larger
    """
    of_group: dict[int, list[dict[str, Any]]] = {}
    for path in paths:
        of_group.setdefault(path["group"], []).append(path)
    for number, group in enumerate(groups, first):
        own = of_group[number]
        totals = [path["total"] for path in own if abs(path["total"]) <= LIMIT]
        for path in own:
            if path["success"] is None and abs(path["total"]) <= LIMIT:
                path["success"] = path["total"] > above
            path["total"] = path["total"] if abs(path["total"]) <= LIMIT else None  # exact: the page compares it again
        flags = [path["success"] for path in own if path["success"] is not None]
        group["success"] = _short(sum(flags) / len(flags)) if flags else None
        group["mean"] = _short(float(np.mean(totals))) if totals else None
        spread = float(np.std(totals)) if totals else math.nan
        equal = spread <= 1e-9 * max(map(abs, totals), default=0.0)  # but for the rounding of sums
        group["std"] = 0.0 if equal else _short(spread)


def _renumbered(labels: Ints, before: Sequence[int]) -> list[int]:
    """Labels that differ from those of earlier parts; −1 stays."""
    ahead = max(before, default=-1) + 1
    return np.where(labels < 0, -1, labels + ahead).tolist()  # type: ignore[no-any-return]


def _floats(values: Any) -> list[float | None]:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | None:
    """Four digits; None for values that are not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _cut(name: str) -> str:
    return name if len(name) <= NAME else name[: NAME - 1] + "…"
