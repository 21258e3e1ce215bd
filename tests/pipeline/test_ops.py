"""torch.ops.bipace: opcheck, the same values as the stages, errors; torch.compile gives the same bits."""

import copy
import gc
import math
import pickle
import re
import runpy
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import CONFIGS, assert_same, make_batch
from marks import slow
from op_cases import OPS, op_cases
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends import dispatch
from bipace_kernels.ops import registry as _ops
from bipace_kernels.support import handles

COMPILED = [name for name in CONFIGS if name != "bipace_similar"]  # texts are no tensors
BATCH = make_batch(0)
NEW = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
PLACES = [(op.name, name) for op in _ops.OPS.values() for name in op.types if name in {**_ops.OFFSETS, **_ops.PLACES}]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.fixture(params=["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in dispatch._AUTO["cuda"])])
def device(request, monkeypatch):
    """The CPU, and a GPU with each of its backends: ops use "auto", which would only run the best."""
    if request.param == "cpu":
        return "cpu"
    status = bk.backends()[request.param]
    if not status.available:
        pytest.skip(str(status))
    monkeypatch.setenv("BIPACE_BACKEND", request.param)
    assert dispatch.taken_for("cuda") == (request.param, "")
    return "cuda"


def given_of(batch, device="cpu", **changes):
    """Arguments of advantage() other than the layout, as tensors."""
    given = {
        "rewards": batch.rewards, "fingerprint": batch.fingerprint, "action_key": batch.action_key,
        "observation": np.array([hash(o) for o in batch.observation]), "action_parsed": np.arange(batch.n) % 3 > 0,
        **changes,
    }  # fmt: skip
    return {name: None if value is None else torch.tensor(value, device=device) for name, value in given.items()}


def layout_of(batch, **changes):
    return bk.layout(batch.group, batch.trajectory, batch.step, **changes)


def call(given, layout, config):
    return bk.advantage(layout=layout, config=config, **given)


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, device):
    op = getattr(torch.ops.bipace, name).default
    for args, kwargs in op_cases(name, device):
        torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize(
    ("backend", "names"),
    [("aot_eager", ["bipace", "hgpo", "gae"]), slow("inductor", ["bipace"]), slow("aot_eager", COMPILED)],
    ids=["aot_eager", "inductor", "every configuration"],
)
def test_compiled_gives_the_same_bits(backend, names, device):
    """One function for every configuration, with arithmetic of the caller's around the call."""

    def whole(given, layout, config):
        result = call({**given, "rewards": given["rewards"] * 0.5}, layout, config)
        return result, result.advantage * 2

    lay, given = layout_of(BATCH), given_of(BATCH, device)
    for name in names:
        torch.compiler.reset()
        result, doubled = torch.compile(whole, fullgraph=True, backend=backend)(given, lay, CONFIGS[name])
        want, _ = whole(given, lay, CONFIGS[name])
        assert_same(result, want)
        assert torch.equal(doubled, want.advantage * 2)


def test_compiled_with_bad_values_padding_and_copies(device):
    batch = BATCH.take(np.concatenate((np.arange(BATCH.n), [0, 5, BATCH.n - 1])))
    batch.rewards[[3]] = np.nan
    batch.fingerprint[7] = np.nan
    valid = np.arange(batch.n) % 6 > 0
    for duplicates in ("once", "count"):
        config = replace(CONFIGS["bipace"], duplicates=duplicates, on_invalid="singleton")
        given, lay = given_of(batch, device, valid=valid), layout_of(batch, valid=valid)
        want = call(given, lay, config)
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(given, lay, config)
        assert want.metrics()["bipace/invalid_row_fraction"] > 0
        assert_same(got, want)
        assert_same(pickle.loads(pickle.dumps(got)), want)


def test_compiled_metrics_are_of_the_values_at_the_call(device):
    given = {name: column.clone() for name, column in given_of(BATCH, device).items()}
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(given, layout_of(BATCH), CONFIGS["bipace"])
    want = got.metrics()
    for column in given.values():
        column.zero_()
    assert got.metrics() == want


def test_new_layouts_and_other_epsilons_are_no_new_compilation():
    calls = []

    def count(graph, inputs):
        calls.append(graph)
        return graph

    step = torch.compile(call, fullgraph=True, backend=count, dynamic=True)
    for seed in range(12):  # more than torch's limit of compilations for one function
        batch = make_batch(seed)
        # Older compilers inspect every field of a frozen dataclass, and recompile for another ε.
        config = bk.Config.bipace(0.05 + 0.02 * seed) if NEW else CONFIGS["bipace"]
        assert_same(step(given_of(batch), layout_of(batch), config), call(given_of(batch), layout_of(batch), config))
    assert len(calls) <= 2


def test_a_config_made_inside():
    lay, given = layout_of(BATCH), given_of(BATCH)

    def inside(given):
        return bk.advantage(layout=lay, config=bk.Config.gigpo(gamma=0.7), **given)

    assert_same(torch.compile(inside, fullgraph=True, backend="aot_eager")(given), inside(given))

    def wrong(given):
        return bk.advantage(layout=lay, config=bk.Config.gigpo(gamma=7.0), **given)

    with pytest.raises(ValueError, match=r"gamma must be a number in \[0, 1\], got 7\.0"):
        torch.compile(wrong, fullgraph=True, backend="aot_eager")(given)


def test_a_gradient_stops_here():
    given = given_of(BATCH)
    given["fingerprint"].requires_grad_()
    step = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert not step(given, layout_of(BATCH), CONFIGS["bipace"]).advantage.requires_grad
    for args, kwargs in op_cases("cluster_cosine", "cpu"):
        assert not torch.ops.bipace.cluster_cosine(args[0].clone().requires_grad_(), *args[1:], **kwargs).requires_grad


def test_a_whole_loss_compiles(device):
    lay, given = layout_of(BATCH), given_of(BATCH, device, observation=None)
    mask = torch.ones(BATCH.n, 3, dtype=torch.bool, device=device)
    log_probability = torch.zeros(BATCH.n, 3, device=device, requires_grad=True)

    def loss(given, log_probability):
        advantage = bk.advantage(layout=lay, **given).advantage
        return -(bk.to_tokens(advantage, mask) * log_probability).sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(given, log_probability).backward()
    want = bk.advantage(layout=lay, **given).advantage
    assert torch.equal(log_probability.grad, -want.unsqueeze(1).expand(-1, 3))


def test_compiled_code_raises_the_errors_of_the_call():
    lay, given = layout_of(BATCH), given_of(BATCH)
    given["rewards"][4] = torch.nan
    with pytest.raises(ValueError) as want:
        call(given, lay, CONFIGS["bipace"])
    with pytest.raises(ValueError) as got:
        torch.compile(call, fullgraph=True, backend="aot_eager")(given, lay, CONFIGS["bipace"])
    assert str(got.value).startswith(str(want.value))  # the interpreter of older compilers adds the node that it ran


CANNOT = [
    ({"layout": None}, "layout is missing; torch.compile needs one"),
    ({"rewards": [1.0] * BATCH.n}, "rewards must be a tensor under torch.compile, got list"),
    ({"fingerprint": None}, "fingerprint is missing"),
    ({"group": torch.zeros(BATCH.n, dtype=torch.int64)}, "group must be None where a layout is given"),
]


@pytest.mark.parametrize(("changes", "words"), CANNOT)
def test_what_cannot_be_compiled_says_why(changes, words):
    """With fullgraph the compiler raises the message; without, the call runs eagerly."""
    arguments = {"layout": layout_of(BATCH), "config": CONFIGS["bipace"], **given_of(BATCH), **changes}

    def whole():
        return bk.advantage(**arguments)

    with pytest.raises(Exception) as error:
        torch.compile(whole, fullgraph=True, backend="eager")()
    chain, shown = error.value, ""
    while chain is not None:
        shown += str(chain)
        chain = chain.__cause__ or chain.__context__
    assert words in shown or not NEW, "older compilers keep the words of the exception to themselves"


def test_without_fullgraph_lists_and_ids_still_work():
    given = BATCH.arguments()
    whole = torch.compile(lambda: bk.advantage(config=CONFIGS["bipace_similar"], **given), backend="eager")
    assert_same(whole(), bk.advantage(config=CONFIGS["bipace_similar"], **given))


WRONG = [
    ("cluster_cosine", {"order": lambda t: t.int()}, TypeError, "order must be torch.int64, got torch.int32"),
    ("cluster_cosine", {"group_offsets": lambda t: t[:-1]}, ValueError, r"group_offsets must have shape \[G\+1\] with"),
    ("cluster_cosine", {"taken": lambda t: t[:-1]}, ValueError, r"taken must have shape \[M\] with M = .* as order"),
    ("cluster_cosine", {"fingerprint": lambda t: t.double()}, TypeError, "fingerprint must be .* got torch.float64"),
    ("step_advantage", {"labels": lambda t: t[None]}, ValueError, r"labels must have shape \[M\], got"),
    ("hgpo_advantage", {"depth_labels": lambda t: t[:, 1:]}, ValueError, "depth_labels must have shape"),
    ("step_advantage", {"action_key": lambda t: None}, ValueError, "action_key is missing; estimator='q_style'"),
    ("step_advantage", {"estimator": lambda t: "max"}, ValueError, "estimator must be one of mean, .* got 'max'"),
    ("hgpo_advantage", {"alpha": lambda t: math.inf}, ValueError, "alpha must be finite and at least 0, got inf"),
    ("episode_advantage", {"scope": lambda t: "group"}, ValueError, "scope must be one of"),
    ("episode_advantage", {"delta": lambda t: 0.0}, ValueError, r"delta must be in \(0, 1e-2\], got 0\.0"),
    ("cluster_cosine", {"fingerprint": lambda t: t[:, :0]}, ValueError, "fingerprint must have at least one feature"),
    ("cluster_cosine", {"epsilon": lambda t: math.nan}, ValueError, r"epsilon must be 0 or in \[1e-4, 1\], got nan"),
    ("cluster_sweep", {"epsilons": lambda t: [0.1, -1.0]}, ValueError, r"epsilons must be 0 or in .* got -1\.0"),
    ("cluster_cosine", {"order": lambda t: None}, TypeError, "order is missing; pass a tensor"),
    ("cluster_cosine", {"group_offsets": lambda t: t[:0], "n_groups": lambda t: -1}, ValueError, "hold at least one"),
    ("discounted_returns", {"gamma": lambda t: 1.5}, ValueError, r"gamma must be in \[0, 1\], got 1\.5"),
    ("hash_token_ids", {"n": lambda t: 0}, ValueError, r"n must be in \[1, \d+\], got 0"),
    ("hash_token_ids", {"mode": lambda t: "text"}, ValueError, "table_offsets and table_bytes must be given"),
    ("hash_token_ids", {"ids": lambda t: t.float()}, TypeError, "ids must be of an integer dtype, got torch.float32"),
    ("hash_token_ids", {"ids": lambda t: t[0]}, ValueError, r"ids must be \[N, T\], or .* row_offsets, got \[4\]"),
    ("hash_token_ids", {"longest_row": lambda t: 3}, ValueError, "longest_row must be T = 4, got 3"),
    ("hash_token_ids", {"valid": lambda t: torch.ones(3, 3)}, ValueError, "valid must have the shape of ids"),
    ("hash_token_ids", {"valid": lambda t: torch.ones(3, 4)}, TypeError, "valid must be bool or integers"),
]


@pytest.mark.parametrize(("name", "changes", "error", "words"), WRONG)
def test_ops_refuse_what_kernels_would_misread(name, changes, error, words):
    op = getattr(torch.ops.bipace, name)
    args, kwargs = op_cases(name, "cpu")[0]
    names = [a.name for a in op.default._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    op(**given)
    refused(words, op, error=error, **given | {k: change(given.get(k)) for k, change in changes.items()})


@pytest.mark.parametrize(("name", "argument"), PLACES)
def test_offsets_and_places_out_of_bounds_are_refused(name, argument):
    """Native code would read or write there, or count for ever: an op looks first where the tensors are on the CPU."""
    op, wrongs = getattr(torch.ops.bipace, name), 0
    for args, kwargs in op_cases(name, "cpu"):
        given = dict(zip([x.name for x in op.default._schema.arguments], args, strict=False)) | kwargs
        right = given.get(argument)
        if right is None:
            continue
        op(**given)
        flat = right.flatten()
        wrong = [flat.clone() for _ in range(3)]
        if argument in _ops.OFFSETS:
            words = f"{argument} must increase from 0 to {_ops.OFFSETS[argument]} = "
            wrong[0][0], wrong[1][-1], wrong[2][1] = -1, flat[-1] + 1, flat[-1] + 5
        else:
            letter, lowest = _ops.PLACES[argument]
            words = f"{argument} must hold numbers from {lowest} to below {letter} = "
            wrong[0][0], wrong[1][-1], wrong[2][0] = lowest - 1, 1 << 53, 1 << 62
        for changed in wrong:
            refused(re.escape(words), op, **given | {argument: changed.view_as(right)})
        wrongs += 1
    assert wrongs


def test_all_other_integers_are_compared_only():
    """A new argument that native code follows needs a row in OFFSETS or PLACES."""
    names = [(op.name, name) for op in _ops.OPS.values() for name in op.types]
    integers = {each for each in names if _ops.TENSORS.get(each[1], ("", None))[1] == torch.int64}
    assert integers - set(PLACES) == {
        ("discounted_returns", "step"), ("gae_advantage", "step"), ("step_advantage", "action_key"),
    }  # fmt: skip


def test_views_are_taken_and_sizes_checked_before_they_are_copied():
    for name in sorted(set(OPS) - {"advantage"}):
        for args, kwargs in op_cases(name, "cpu"):
            spread = [torch.stack([a, a], dim=-1)[..., 0] if isinstance(a, torch.Tensor) else a for a in args]
            one, other = (getattr(torch.ops.bipace, name)(*given, **kwargs) for given in (args, spread))
            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (one, other)), strict=True):
                assert torch.equal(a, b), name
    op, ends, value = torch.ops.bipace, torch.tensor([0, 2]), torch.zeros(2, dtype=torch.float64)
    huge, ids = (torch.zeros((), dtype=t).expand(1 << 50) for t in (torch.float64, torch.int64))  # too large a copy
    given = (huge, value, None, ends, None, 0.9, 0.9)
    refused("value must have shape .* as rewards has it", op.gae_advantage, *given, n_trajectories=1, taken=None)
    refused("increase from 0 to M = 11258", op.discounted_returns, huge, None, ends, 0.9, n_trajectories=1)
    given = (ids, ends, None, None, None)
    refused("increase from 0 to E = 11258", op.hash_token_ids, *given, mode="first_n", n=1, longest_row=2)


def test_handles_go_with_their_objects():
    lay, config = layout_of(BATCH), bk.Config.bipace(0.123)
    for thing in (lay, config):
        assert handles.find(thing._handle) is thing
        for other in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing)), replace(thing)):
            assert other._handle != thing._handle
            assert handles.find(other._handle) is other
    assert replace(config) == config
    gone = lay._handle
    del lay, thing, other
    gc.collect()
    refused(f"no object has the handle {gone} any more; keep Layout and Config", handles.find, gone, error=RuntimeError)
    # An exported program that another process loads must not find that one's objects.
    first, second = (next(runpy.run_path(handles.__file__)["_numbers"]) for _ in range(2))
    assert first != second
