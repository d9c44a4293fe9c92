"""ckpt-run beside its peers and beside the limits of the machine: ``python -m benchmarks``, or ``make bench``."""
