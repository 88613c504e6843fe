"""Supervised training alone: the first phase of `experiments.train`.

    python -m experiments.sft --config=configs/quickstart.py --workdir=runs/sft
    python -m experiments.sft --workdir=runs/more --config.init_from=runs/sft --config.sft.steps=80 --config.sft.batch_size=256

With `--config.init_from` it goes on from the warm-up of another run, with a fresh optimiser.
"""

from experiments import cli
from experiments.training import Run

_CONFIG = cli.config_flag()
_WORKDIR = cli.workdir_flag()


def main(argv):
    del argv
    config = _CONFIG.value.copy_and_resolve_references()
    config.rl.steps = 0
    Run(config, _WORKDIR.value)()


if __name__ == "__main__":
    cli.run(main, config="configs/quickstart.py", required=("workdir",))
