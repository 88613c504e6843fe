"""The parts of `python -m experiments.benchmark`: cases, peers, ceilings, tuning."""
