"""Makes the sets of bench/truth, in a fixed order. Existing sets are kept, and interrupted ones are resumed."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.make_truth", description=__doc__)
    sets = parser.add_subparsers(dest="set", required=True)
    textcraft = sets.add_parser("textcraft", help="TextCraft with the noisy planner; ten minutes of one core")
    _options(textcraft, 256)
    training = sets.add_parser("train", help="the training run whose policies `model` looks at; needs TRL")
    model = sets.add_parser("model", help="TextCraft with the example's model as policy; half an hour of one core")
    _options(model, 32)
    along = sets.add_parser(
        "along", help="policies along a run of examples/textcraft; needs TRL; 20 minutes of one core"
    )
    along.add_argument("run", type=Path, help="JSON of the finished run")
    along.add_argument(
        "--continuations", type=int, default=32, metavar="M", help="of each state (default: %(default)s)"
    )
    along.add_argument("--out", type=Path, default=Path("out/truth_along"), help="folder of the sets")
    for command in (training, model):
        command.add_argument("--out", type=Path, default=Path("out/truth_model"), help="folder of the run's weights")
    alfworld = sets.add_parser("alfworld", help="ALFWorld with a scripted searcher; needs textworld[pddl]")
    _options(alfworld, 64)
    alfworld.add_argument("--games", type=Path, required=True, help="folder with the games, each a game.tw-pddl")
    alfworld.add_argument(
        "--check", action="store_true", help="only compare the games' graphs with TextWorld's own engine"
    )
    arguments = parser.parse_args()
    if "continuations" in arguments and (arguments.continuations < 2 or arguments.continuations % 2):
        parser.error("--continuations must be even and at least 2: the truth's reliability comes from its two halves.")
    from . import alfworld as games
    from . import model as of_model
    from . import textcraft as planner

    if arguments.set == "alfworld":
        if arguments.check:
            raise SystemExit(1 if games.check(arguments.games) else 0)
        for role in games.ROLES:
            for noise in games.NOISES:
                if arguments.only in f"alfworld_{round(100 * noise)}_{role}":
                    games.make(noise, role, arguments.continuations, arguments.games, arguments.again)
    elif arguments.set == "textcraft":
        for role in planner.ROLES:
            for noise in planner.NOISES:
                if arguments.only in f"textcraft_planner{round(100 * noise)}_{role}":
                    planner.make(noise, role, arguments.continuations, arguments.again)
    elif arguments.set == "train":
        of_model.train(arguments.out)
    elif arguments.set == "along":
        of_model.along(arguments.run, arguments.continuations, arguments.out)
    elif arguments.set == "model":
        for role in planner.ROLES:
            for update in of_model.UPDATES:
                if arguments.only in f"textcraft_model{update}_{role}":
                    of_model.make(update, role, arguments.continuations, arguments.out, arguments.again)


def _options(parser: argparse.ArgumentParser, continuations: int) -> None:
    parser.add_argument(
        "--continuations", type=int, default=continuations, metavar="M", help="of each state (default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="rebuild existing sets")
    parser.add_argument("--only", default="", help="only sets whose name contains this")


if __name__ == "__main__":
    main()
