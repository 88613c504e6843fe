"""Trains a policy: supervised warm-up, then GRPO.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart
    python -m experiments.train --workdir=runs/naive --config.sampler.engine=naive --config.init_from=runs/quickstart
    --config.sft.steps=0

The workdir gets config.json, metrics.jsonl (one object per step), checkpoints/, warmup/ (the weights at the end of the
warm-up, which `--config.init_from` of another run can start from) and plots/*.png. The same command on the same workdir
resumes bit for bit. `--config.sampler.engine=naive` samples with a deliberately different engine, to see what a gap looks like;
`--config.sampler.engine=attention` (or another level of `experiments.baselines.choices`) differs in that alone.
"""

from experiments import cli
from experiments.training import Run

_CONFIG = cli.config_flag()
_WORKDIR = cli.workdir_flag()


def main(argv):
    del argv
    Run(_CONFIG.value, _WORKDIR.value)()


if __name__ == "__main__":
    cli.run(main, config="configs/quickstart.py", required=("workdir",))
