"""One table of settings: a field that is added to it is found wherever a setting can be written."""

import os
import shutil
import sys

import settings_page
from bipace_kernels.integrations._settings import Settings
from bipace_kernels.integrations.verl_agent.settings import keys
from paths import ROOT, program

from bipace_kernels.settings import ABSENT, Fields, settings_of

FIELD = """    luck_noise: float = setting(
        0.25, "share of later luck in the noise of returns", NOT_NEGATIVE, "β", read_by=_KERNEL
    )
"""
READ = """
import importlib.util, inspect, sys
import bipace_kernels as bk
from bipace_kernels.integrations._settings import Settings
from bipace_kernels.integrations.swift import join
from bipace_kernels.integrations.verl_agent.settings import Settings as Agents, keys

assert bk.__file__.startswith(sys.argv[1]), bk.__file__
assert bk.Config.gae(luck_noise=0.5).luck_noise == 0.5 and "luck_noise" in bk.Config.__doc__
assert "luck_noise" in inspect.signature(bk.Config).parameters
wrong = {"method": "bipace", "luck_noise": 1}
for make in (lambda: bk.Config(luck_noise=-1), lambda: Settings(luck_noise=-1), lambda: Settings.of(wrong)):
    try:
        make()
    except ValueError as error:
        assert error.argument == "luck_noise", error
    else:
        raise AssertionError("an invalid value passed")
given = {"method": "gae", "luck_noise": 0.5}
assert Settings.of(given).config().luck_noise == 0.5  # of Trinity-RFT and ms-swift
if importlib.util.find_spec("verl"):
    from bipace_kernels.integrations.verl.estimator import settings_of
    assert settings_of({"bipace": given}).config().luck_noise == 0.5
assert keys()["bipace_luck_noise"] is None
gigpo = {"bipace_method": "gae", "bipace_luck_noise": 0.5, "bisim_embedder": "ngram"}
agents = {"algorithm": {"adv_estimator": "gigpo", "gamma": 0.9, "gigpo": gigpo}, "env": {"rollout": {"n": 2}},
          "actor_rollout_ref": {"actor": {"invalid_action_penalty_coef": 0.1}}}
assert Agents.of(agents).config().luck_noise == 0.5
if importlib.util.find_spec("trl"):
    from transformers import HfArgumentParser
    from bipace_kernels.integrations.trl import BiPACEGRPOConfig
    line = "--output_dir x --use_cpu true --bf16 false --bipace_method gae --bipace_luck_noise 0.5".split()
    (args,) = HfArgumentParser(BiPACEGRPOConfig).parse_args_into_dataclasses(line)
    assert args.settings.config().luck_noise == 0.5
from typer.testing import CliRunner
from bipace_cli.commands import app
shown = CliRunner().invoke(app, ["advantage", "--help"], env={"COLUMNS": "300"}).output
assert "--luck-noise" in shown and "Share of later luck" in shown
import settings_page
tables = settings_page.tables()
assert "| `luck_noise` | `0.25` |" in tables["config"] and "bipace_luck_noise" in tables["verl-agent"]
"""


def test_a_field_of_the_table_is_a_setting_everywhere_unless_it_says_so_and_the_page_holds_the_tables(tmp_path):
    """Config, Trinity-RFT, ms-swift, verl-agent, verl and TRL where they are installed, the program, and the page."""
    unneeded = shutil.ignore_patterns("__pycache__", "csrc")
    package = shutil.copytree(ROOT / "bipace_kernels", tmp_path / "bipace_kernels", ignore=unneeded)
    shutil.copytree(ROOT / "integrations", package / "integrations", ignore=unneeded)
    shutil.copytree(ROOT / "bipace_kernels/cli/program", tmp_path / "bipace_cli", ignore=unneeded)
    path = package / "settings.py"
    path.write_text(path.read_text() + FIELD)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests/helpers")])}
    program(sys.executable, "-c", READ, tmp_path, env=environment, cwd=tmp_path)
    page = settings_page.PAGE.read_text()
    assert settings_page.written(page) == page, "python tests/helpers/settings_page.py writes it anew"
    rows = settings_of(Fields)
    assert {name for name, row in rows.items() if row.trainer is not ABSENT} | set(
        settings_page.settings_of(settings_page.OwnFields)
    ) == set(settings_of(Settings))
    switches = [value for name, value in keys().items() if name.endswith(("grouping", "enabled", "method"))]
    assert set(switches) <= {None, False}
