"""docs/trl.md and README.md's lines for TRL run as pasted, with a tiny model in place of the one from the hub."""

import doc_blocks
import pytest
import tiny_trl as tt
import tool_turns


@pytest.fixture
def smaller(tmp_path):
    """What stands on the pages, and what takes its place here."""
    tokenizer = tool_turns.tokenizer()
    model = tt.make_model(vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    on_a_cpu = "max_steps=1, use_cpu=True, bf16=False, report_to=[]"
    return {
        '"Qwen/Qwen3-0.6B"': repr(str(tmp_path / "model")),
        '"Qwen/Qwen2.5-7B-Instruct"': repr(str(tmp_path / "model")),
        "max_steps=20,\n": "",
        "max_completion_length=1024,\n": "",
        '"out",': f"{str(tmp_path / 'out')!r}, {on_a_cpu}, max_completion_length=16,",
        "num_generations=8": "num_generations=2",
        "per_device_train_batch_size=16": "per_device_train_batch_size=4",
        "per_device_train_batch_size=64": "per_device_train_batch_size=4",
    }


def trained(trainer):
    return trainer.state.global_step == 1 and any("bipace/mean_advantage" in line for line in trainer.state.log_history)


def test_the_page_on_trl_runs_and_so_do_readme_s_lines_and_the_trainer_of_one_s_own(smaller):
    names = doc_blocks.run("docs/trl.md", {"__name__": "page"}, replacing=smaller)
    assert trained(names["trainer"])
    (lines,) = [block.code for block in doc_blocks.blocks("README.md", "python") if "BiPACEGRPOTrainer" in block.code]
    for written, used in smaller.items():
        lines = lines.replace(written, used)
    environment = names["LoggingCounter"]()
    assert environment.reset() == "The total is 0." and environment.add(5) == "The total is 3."
    of_readme = {"__name__": "readme"}  # it is a whole program
    exec(compile(lines, "README.md", "exec"), of_readme)
    assert trained(of_readme["trainer"])
    trainer = names["Mine"](
        model=names["trainer"].model, reward_funcs=names["solved"], args=names["args"], train_dataset=names["tasks"],
        environment_factory=names["LoggingCounter"], processing_class=names["trainer"].processing_class,
    )  # fmt: skip
    trainer.train()
    assert trained(trainer) and trainer.loop.fields is not None
