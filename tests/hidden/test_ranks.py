"""Two processes (gloo): DDP, FSDP 1 and 2, and DeepSpeed ZeRO-3 where it is installed.  The checks are in
hidden_ranks.py."""

import importlib.util

import pytest
from spawned import run_ranks

pytestmark = pytest.mark.slow
WRAPPERS = ("ddp", "fsdp1", "fsdp2", "zero3")
CHECKS = ("tap", "extract", "interrupt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of both ranks, by case; ZeRO-3 in separate processes, since DeepSpeed changes torch on import."""
    groups = [[*(f"{check}:{w}" for check in CHECKS for w in WRAPPERS[:3]), "alone:fsdp2"]]
    if importlib.util.find_spec("deepspeed") is not None:
        groups.append([f"{check}:zero3" for check in CHECKS])
    both = {}
    for cases in groups:
        ranks = run_ranks("hidden_ranks.py", tmp_path_factory.mktemp("ranks"), cases, 2, 280)
        both |= {case: [rank[case] for rank in ranks] for case in cases}
    return both


def of(found, case):
    if case not in found:
        pytest.skip("deepspeed is not installed")
    for rank in found[case]:
        assert "failed" not in rank, rank["failed"]
    return found[case]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_tap_sees_what_the_bare_model_gives_and_changes_nothing(found, wrapper):
    for rank in of(found, f"tap:{wrapper}"):
        for name, error in rank["errors"].items():
            assert error < 1e-5, name
        assert rank["same_loss"] and rank["same_gradients"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_early_exit_on_every_rank(found, wrapper):
    """Other prompts on each rank; training before and after is as if nothing had happened."""
    ranks = of(found, f"extract:{wrapper}")
    for rank in ranks:
        for name, error in rank["errors"].items():
            assert error < 1e-5, name
        assert rank["loss"], "a training step after an extraction is not the step without it"
        assert not rank["own_roots"], "a first forward that stops early must leave the later blocks in FSDP's tree"
        assert rank["moved"], "the second extraction must see the weights that the step has changed"
    if wrapper != "ddp":  # whose forwards are nobody's business but the rank's
        assert ranks[0]["forwards"] == ranks[1]["forwards"] > 3
        assert [rank["error"] for rank in ranks] == ["RuntimeError", "ValueError"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_interrupt_of_all_ranks_leaves_nothing_behind(found, wrapper):
    for rank in of(found, f"interrupt:{wrapper}"):
        assert rank["stopped"] == "KeyboardInterrupt"
        assert rank["tree"], "modules and modes must be as they were found"
        assert rank["error"] < 1e-5
        assert rank["loss"], "a training step after it is not the step without it"


def test_an_interrupt_of_one_rank_ends_the_others_wait_with_an_error(found):
    """Where the interrupted process ends: the other's collective fails, and its modules are put back too."""
    ranks = of(found, "alone:fsdp2")
    assert [rank["stopped"] for rank in ranks] == ["KeyboardInterrupt", "RuntimeError"]
    assert all(rank["tree"] for rank in ranks)
