"""Makes the sets of bench/truth, in a fixed order. Existing sets are kept, and interrupted ones are resumed."""

import argparse
import sys
from pathlib import Path

from ..truth_sets import FOLDER


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.make_truth", description=__doc__)
    sets = parser.add_subparsers(dest="set", required=True)
    commands = {}
    for name, continuations, out, what in (
        ("textcraft", 256, "", "TextCraft with the noisy planner; ten minutes of one core"),
        ("train", 0, "out/truth_model", "the training run whose policies `model` looks at; needs TRL"),
        ("model", 32, "out/truth_model", "TextCraft with the example's model as policy; half an hour of one core"),
        ("along", 32, "out/truth_along", "policies along a run of examples/textcraft; needs TRL; 20 minutes of a core"),
        ("smollm2", 32, "out/smollm2", "TextCraft or BabyAI with a pretrained language model; needs its weights"),
        ("alfworld", 64, "", "ALFWorld with a scripted searcher; needs textworld[pddl]"),
    ):
        commands[name] = command = sets.add_parser(name, help=what)
        if continuations:
            command.add_argument("--continuations", type=int, default=continuations, metavar="M",
                                 help="of each state (default: %(default)s)")  # fmt: skip
        if out:
            command.add_argument("--out", type=Path, default=Path(out), help="of weights and sets (%(default)s)")
        if name not in ("train", "along", "smollm2"):
            command.add_argument("--again", action="store_true", help="rebuild existing sets")
            command.add_argument("--only", default="", help="only sets whose name contains this")
    commands["smollm2"].add_argument("environment", choices=("textcraft", "babyai"))
    commands["along"].add_argument("run", type=Path, help="JSON of the finished run")
    commands["alfworld"].add_argument("--games", type=Path, required=True, help="folder of games, each a game.tw-pddl")
    commands["alfworld"].add_argument("--check", action="store_true",
                                      help="only compare the games' graphs with TextWorld's own engine")  # fmt: skip
    arguments = parser.parse_args()
    if "continuations" in arguments and (arguments.continuations < 2 or arguments.continuations % 2):
        parser.error("--continuations must be even and at least 2: the truth's reliability comes from its two halves.")
    from . import alfworld, language_model, model, textcraft

    if arguments.set == "smollm2":
        print(language_model.make(arguments.environment, arguments.out, arguments.continuations))
        return None
    if arguments.set == "train":
        return model.train(arguments.out)
    if arguments.set == "along":
        return model.along(arguments.run, arguments.continuations, arguments.out)
    if arguments.set == "alfworld" and arguments.check:
        raise SystemExit(1 if alfworld.check(arguments.games) else 0)
    maker, variants = {
        "textcraft": (textcraft, textcraft.NOISES), "model": (model, model.UPDATES),
        "alfworld": (alfworld, alfworld.NOISES)
    }[arguments.set]  # fmt: skip
    for role in textcraft.ROLES:
        for variant in variants:
            path = FOLDER / f"{maker.NAME}{variant}_{role}.npz"
            if arguments.only not in path.stem:
                continue
            if path.exists() and not arguments.again:
                print(f"{path} is there already", file=sys.stderr)
            else:
                maker.make(path, variant, role, arguments)
    return None


if __name__ == "__main__":
    main()
