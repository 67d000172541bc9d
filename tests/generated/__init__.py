"""Random networks, and random things that users do to them between steps.

A `Case` is drawn from one seed: a network, an optimiser, one to four devices,
and steps with what happens before, in and after each. `run` takes it step by
step with mgpu and with the plain one-device loop of the framework itself, and
compares losses, weights and statistics after each step. Either they are equal,
or mgpu refuses by name and nothing has changed.

    python -m tests.generated --cases 300       # both engines
    python -m tests.generated --engine torch --seed 17
    python -m tests.generated.interrupts --count 1000
"""
from .cases import Case, Step, draw
from .lockstep import Failure, run

__all__ = ["Case", "Failure", "Step", "draw", "run"]
