"""`bipace calibrate` on a tiny model in a folder: everything it writes, going on, and its errors."""

import json
import random
import sys

import pytest
from cli_runs import fail, run, write
from tiny_models import make
from trained_tokenizers import NOUNS, VERBS, byte_level

import bipace_kernels as bk
from bipace_kernels.calibration.result import Scanned
from bipace_kernels.cli import figures
from bipace_kernels.hidden import Layer

pytest.importorskip("sklearn", reason="scikit-learn is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--layers", "-3,block 5", "--pooling", "last,mean", "--epsilons", "0.001,0.1", "--folds", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen2 of six blocks with random weights, and a trained tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    make(num_hidden_layers=6, vocab_size=len(tokenizer)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rng = random.Random(1)
    rows = []
    for i in range(30):
        verb = VERBS[i % 3]
        words = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(1, 5)))
        rows.append({"prompt": f"{words}. {verb} {rng.choice(NOUNS)}", "task_type": verb, "game": i % 2})
    return write(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.mark.slow
def test_everything_it_writes(folder, prompts, tmp_path):
    out = tmp_path / "out"
    args = ("calibrate", folder, prompts, "--out", out, "--chat", *SMALL, "--min-clusters", 3)
    shown = run(*args)
    assert shown.exit_code == 0, shown.output
    assert {path.name for path in out.iterdir()} == {
        "calibration.md", "calibration.json", "calibration.png", "calibration.yaml", "states",
    }  # fmt: skip
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chats = [f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n" for row in rows]
    direct = bk.calibrate(
        model, [tokenizer(chat)["input_ids"] for chat in chats], [row["task_type"] for row in rows],
        layers=[-3, "block 5"], pooling=("last", "mean"), epsilons=[0.001, 0.1], folds=3, min_clusters=3,
    )  # fmt: skip
    wanted = {"label": "task_type", **json.loads(json.dumps(direct.as_json()))}
    assert json.loads((out / "calibration.json").read_text()) == wanted
    assert direct.choice is not None and (out / "calibration.yaml").read_text() == direct.yaml()
    assert (out / "calibration.md").read_text() == direct.markdown("calibration.png")
    assert str(direct.choice.layer) in shown.output and "time: states" in shown.output
    assert "went on" not in shown.output
    first = {path.name: path.read_bytes() for path in out.glob("calibration.*")}
    again = run(*args)
    assert "resumed an earlier run with the states of 30 of 30 prompts" in again.output
    assert first == {path.name: path.read_bytes() for path in out.glob("calibration.*")}
    # Nothing qualifies: the tables are still written, and no choice of an earlier run remains.
    message = fail(*args[:-1], 31)
    assert "nothing was chosen: no layer and pooling has an ε with at least 31 clusters" in message
    assert not (out / "calibration.yaml").exists() and "Nothing chosen" in (out / "calibration.md").read_text()
    ungrouped = json.loads((out / "calibration.json").read_text())
    run(*args, "--group", "game")
    grouped = json.loads((out / "calibration.json").read_text())
    assert (ungrouped["groups"], grouped["groups"]) == (1, 2)
    text = fail(*(arg for arg in args if arg != "--chat"))  # other tokens
    assert "holds states of other prompts" in text and "--restart" in text
    assert run(*(arg for arg in args if arg != "--chat"), "--restart").exit_code == 0


def test_bad_input(folder, prompts, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def wrong(*args):
        text = fail("calibrate", *args, "--out", out)
        assert not out.exists()
        return text

    assert "has no config.json" in wrong(tmp_path, prompts)
    assert "no_such.jsonl is not a file" in wrong(folder, tmp_path / "no_such.jsonl")
    for option, value, message in (
        ("--label", "kind", 'line 1: the field "kind" is missing; name its column with --label'),
        ("--layers", "deep", "--layers must be all, or numbers"),
        ("--epsilons", "small", "--epsilons must be numbers"),
        ("--device", "nowhere", "--device nowhere cannot be used here: "),
        ("--folds", "99", "must have 99 distinct prompts, as folds"),
        ("--dtype", "int8", "--dtype must be auto"),
    ):
        assert message in wrong(folder, prompts, option, value)
    bad = write(tmp_path / "bad.jsonl", [{"prompt": "a", "task_type": "x"}, {"prompt": 3, "task_type": "x"}])
    assert 'bad.jsonl, line 2, field "prompt": expected a prompt' in wrong(folder, bad)
    assert "holds no prompts" in wrong(folder, write(tmp_path / "empty.jsonl", []))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "bipace calibrate needs the package transformers" in wrong(folder, prompts)


def test_the_heat_map_takes_what_does_not_exist(tmp_path):
    row = Scanned(Layer(0, 2), "last", 0.1, 1, 1.0, 1.0, 1.0, 0.5, 0.0, False)
    found = bk.Calibration((row,), None, "", "$a_b$", 1, 1, 1, 1, 0.5, 5, 5, 0, 0, {})
    for name in "ab":
        figures.heat_map(tmp_path / f"{name}.png", found)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
