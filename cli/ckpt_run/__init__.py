"""The command ``ckpt-run``: runs a training command so that its Trainers checkpoint while they train."""
