"""Partitions on the CPU: "similar" against difflib itself; exact and history, for any codes, by the reference."""

import itertools
import math
import random
from difflib import SequenceMatcher

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends import native_loader, threads as _threads
from bipace_kernels.backends.cpu import observations as cpu_observations, similar as cpu
from bipace_kernels.backends.records import Records
from bipace_kernels.backends.reference import observations as reference_observations, similar as reference

RECEPTACLES = "drawer cabinet countertop shelf fridge microwave sinkbasin stoveburner desk bed dresser sofa"
THINGS = "mug apple book cellphone keychain pillow laptop alarmclock pencil bowl plate knife spoon candle towel"
WIDE = "aé漢字ßЖ\U0001f600\U0001f680\U00020000\ud800\uffff \n"


def observation(rng, length):
    """Sentences in the manner of a household text game."""
    receptacles, things = RECEPTACLES.split(), THINGS.split()
    out = ""
    while len(out) < length:
        place = f"{rng.choice(receptacles)} {rng.randint(1, 9)}"
        seen = ", ".join(f"a {rng.choice(things)} {rng.randint(1, 5)}" for _ in range(rng.randint(0, 5))) or "nothing"
        out += f"On the {place}, you see {seen}. "
    return out[:length]


def edited(rng, text, edits):
    letters = list(text)
    for _ in range(edits):
        at = rng.randint(0, len(letters))
        kind = rng.randint(0, 3)
        if kind == 0:
            letters.insert(at, rng.choice("abc 123"))
        elif kind == 1 and letters:
            del letters[min(at, len(letters) - 1)]
        elif kind == 2 and letters:
            letters[min(at, len(letters) - 1)] = rng.choice("abc 123")
        else:
            a, b = sorted((at, rng.randint(0, len(letters))))
            letters = letters[:a] + letters[b:] + letters[a:b]
    return "".join(letters)


def pair(rng):
    """Two texts of 1 to 600 characters; the kinds are those where a matcher could go wrong."""

    def size():
        # Half of the lengths at the edge of the popular-element rule, and at the steps of its threshold.
        if rng.random() < 0.5:
            return rng.choice((198, 199, 200, 201, 299, 300, 301, 400, 599, 600))
        return rng.randint(1, 600)

    kind = rng.randint(0, 7)
    if kind == 0:  # small alphabet: many ties
        alphabet = "abcdefghijkl"[: rng.randint(2, 12)]
        if len(alphabet) < 5:  # difflib takes quadratic time and worse here
            longest = 199 if rng.random() < 0.1 else 80
            return tuple("".join(rng.choices(alphabet, k=rng.randint(1, longest))) for _ in range(2))  # type: ignore[return-value]
        return tuple("".join(rng.choices(alphabet, k=rng.choice((rng.randint(1, 150), 200, 333)))) for _ in range(2))  # type: ignore[return-value]
    if kind == 1:
        return observation(rng, size()), observation(rng, size())
    if kind == 2:  # near-duplicates
        text = observation(rng, size())
        return text, edited(rng, text, rng.randint(0, 12)) or "x"
    if kind == 3:  # repeats
        unit = observation(rng, rng.randint(7, 60))
        return (unit * 100)[: size()], (edited(rng, unit, 2) * 100)[: size()] or "x"
    if kind == 4:  # beyond the basic plane, lone surrogates
        letters = WIDE + "".join(chr(rng.randint(0x4E00, 0x4E00 + 200)) for _ in range(rng.randint(0, 200)))
        return tuple("".join(rng.choices(letters, k=rng.choice((200, rng.randint(1, 300))))) for _ in range(2))  # type: ignore[return-value]
    if kind == 5:  # a count at the popularity threshold, exactly and one off
        n = rng.choice((200, 250, 300, 599, 600))
        most = n // 100 + 1
        letters = [chr(0x100 + k) for k in range(n)]
        for letter in "xyz":
            for at in rng.sample(range(n), most + rng.randint(0, 1)):
                letters[at] = letter
        b = "".join(letters)
        return edited(rng, b, rng.randint(1, 8)), b
    if kind == 6:  # popular letters only, one alone
        b = "a" * rng.randint(190, 400)
        return edited(rng, b, rng.randint(0, 3)) or "a", b
    return observation(rng, rng.randint(1, 40)), observation(rng, size())  # lengths far apart


def has_ratio(a, b, want):
    """Whether a joins the cluster of b where their ratio need be `want`, and not where it need be the next double."""
    labels = torch.empty(2, dtype=torch.int64)

    def joins(similarity):
        native_loader.load().cluster_similar((b, a), offsets(2), 1, similarity, 1, labels)
        return labels.tolist() == [0, 0]

    return joins(want) and (want == 1.0 or not joins(math.nextafter(want, 2.0)))


def assert_pairs_equal(seed, n):
    rng = random.Random(seed)
    for k in range(n):
        a, b = pair(rng)
        assert len(a) >= 1 and len(b) >= 1, (seed, k)
        want = SequenceMatcher(None, a, b).ratio()
        assert has_ratio(a, b, want), f"seed {seed}, pair {k}: {a!r} {b!r}"


def offsets(*sizes):
    return torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)


def test_ratio_equals_difflib_on_2000_pairs():
    assert_pairs_equal(seed=1, n=2_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 105))
def test_ratio_equals_difflib_long(seed):
    assert_pairs_equal(seed, n=10_000)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.integers(1, 40), st.integers(1, 40))
def test_ratio_equals_difflib_hypothesis(a, b, times_a, times_b):
    a, b = (a * times_a)[:250], (b * times_b)[:250]
    assert has_ratio(a, b, SequenceMatcher(None, a, b).ratio())


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abcde", max_size=12), st.integers(1, 60), st.integers(1, 12))
def test_equal_texts_have_ratio_one(unit, times, tail):
    """The shortcut for equal texts rests on this: popular elements never break the diagonal."""
    text = unit * times + "z" * tail
    assert SequenceMatcher(None, text, str(text)).ratio() == 1.0 and has_ratio(text, text, 1.0)


def test_golden_ratios_and_first_fit():
    assert has_ratio("", "", 1.0)
    assert has_ratio("", "a", 0.0) and has_ratio("a", "", 0.0)
    assert has_ratio("abcd", "bcde", 0.75)  # 2 · 3 / 8
    assert has_ratio("ab", "acab", 2 * 2 / 6)  # "ab" at the end of b, not a common prefix "a"
    # 200 elements: "a" is popular and starts no match, but a stretch from the low corner still goes over it ...
    assert has_ratio("a" * 200, "a" * 200, 1.0)
    # ... and not over the first mismatch, where 199 elements would match nearly everything.
    assert has_ratio("b" + "a" * 199, "c" + "a" * 199, 0.0)
    assert has_ratio("b" + "a" * 198, "c" + "a" * 198, 2 * 198 / 398)
    # Ratios with ten letters are tenths: 1 joins 0 (0.9); 2 is 0.8 to 0 and 0.9 to 1, which founded nothing, so it
    # seeds a cluster; 3 is 0.9 to both first members and joins the oldest; the second group starts again.
    texts = ["abcdefghij", "abcdefghiX", "abcdefghYX", "abcdefghYj", "abcdefghij", "zzz", "", ""]
    for backend in (reference, cpu):
        labels = backend.cluster_similar(texts, offsets(4, 4), 0.9)
        assert labels.tolist() == [0, 0, 1, 0, 2, 3, 4, 4] and labels.dtype == torch.int64


@pytest.mark.parametrize("similarity", [1e-9, 0.3, 0.5, 0.6, 2 / 3, 0.8, 0.9, 0.95, 0.99, 1.0])
def test_labels_equal_reference(similarity):
    rng = random.Random(7)
    texts = []
    sizes = [0, 1, 14, 0, 20, 9]
    for size in sizes:
        base = [observation(rng, rng.randint(0, 230)) for _ in range(4)]
        texts += [edited(rng, rng.choice(base), rng.choice((0, 0, 1, 3, 8, 30))) for _ in range(size)]
    want = reference.cluster_similar(texts, offsets(*sizes), similarity)
    for threads in (1, 2, 3, 8):
        with _threads.using(threads):
            got = cpu.cluster_similar(texts, offsets(*sizes), similarity)
        assert got.tolist() == want.tolist(), (similarity, threads)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.text("ab\U0001f600", max_size=8), max_size=8), max_size=4), *[st.integers(1, 20)] * 2)
def test_labels_equal_reference_at_rational_thresholds(groups, p, q):
    """Thresholds that ratios meet exactly: the comparison of doubles must be Python's."""
    similarity = min(p, q) / max(p, q)
    texts = [text for group in groups for text in group]
    bounds = offsets(*(len(group) for group in groups))
    want = reference.cluster_similar(texts, bounds, similarity)
    assert cpu.cluster_similar(texts, bounds, similarity).tolist() == want.tolist()


def test_one_group_alone_is_the_group_in_a_batch_and_nothing_subclasses_and_what_is_no_text():
    rng = random.Random(11)
    groups = [[observation(rng, 60) for _ in range(12)] for _ in range(5)]
    together = cpu.cluster_similar(list(itertools.chain(*groups)), offsets(*[12] * 5), 0.6)
    for k, group in enumerate(groups):
        alone = cpu.cluster_similar(group, offsets(12), 0.6)
        inside = together[12 * k : 12 * k + 12]
        assert (inside - inside.min()).tolist() == alone.tolist()
    for backend in (reference, cpu):
        for none in (offsets(), offsets(0, 0)):
            assert backend.cluster_similar([], none, 0.95).shape == (0,)
    name = type("Name", (str,), {})
    assert cpu.cluster_similar([name("ab"), "ab"], offsets(2), 1.0).tolist() == [0, 0]
    refused("texts must be str", cpu.cluster_similar, ["a", 5], offsets(2), 0.95, error=TypeError)


def test_longer_texts_than_the_configuration_allows_are_refused():
    """Two of 80,000 characters can take half a minute."""

    def result(config, **given):
        texts = ["a" * 9, "b" * 10, "c" * 11]
        return bk.advantage([0] * 3, [0, 1, 2], [1.0, 0.0, 2.0], observation=texts, config=config, **given)  # type: ignore[arg-type]

    config = bk.Config.gigpo(partition="similar", longest_text=10)
    refused(r"at most longest_text = 10 .* got 11 at row 2; .* Config\(longest_text=11\)", result, config)
    assert result(config, valid=[True, True, False]).cluster.tolist() == [0, 1, -1]
    assert result(bk.Config.gigpo(partition="similar")).cluster.tolist() == [0, 1, 2]
    for wrong in (0, True, 2.0):
        refused("longest_text must be an int of at least 1", bk.Config, longest_text=wrong)


OBSERVATIONS = (cpu_observations, reference_observations)
CODES = {
    "small": lambda rng, n: rng.integers(0, 7, n),
    "as many as records": lambda rng, n: rng.permutation(n),
    "negative": lambda rng, n: rng.integers(-5, 3, n),
    "multiples of 2^40": lambda rng, n: rng.integers(0, 9, n) << 40,
    "the whole range": lambda rng, n: rng.choice([-(2**63), 2**63 - 1, 0, -1, n, n - 1], n),
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("lengths", [[], [1], [5, 0, 3, 40], [300, 1, 1]])
def test_labels_are_those_of_the_reference(lengths, name):
    rng = np.random.default_rng(len(lengths))
    n = sum(lengths)
    codes = torch.from_numpy(CODES[name](rng, n))
    groups = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    cuts = np.unique(rng.integers(0, n + 1, n // 4))
    trajectories = torch.from_numpy(np.unique(np.concatenate([groups.numpy(), cuts])))
    step = torch.from_numpy(np.repeat(np.arange(n), rng.integers(1, 3, n))[:n].copy())  # some are recorded twice
    counts = (n, n, len(lengths), trajectories.numel() - 1, max(lengths, default=0))
    columns = {"group_offsets": groups, "trajectory_offsets": trajectories, "step": step}
    records = Records(torch.device("cpu"), *counts, **columns)
    native, wanted = ((b.cluster_exact(records, codes), b.cluster_history(records, codes, 3)) for b in OBSERVATIONS)
    assert torch.equal(native[0], wanted[0]) and torch.equal(native[1], wanted[1])
