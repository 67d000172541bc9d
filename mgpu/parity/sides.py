"""The older name of the modules `side`, `run`, `live` and `masks`."""
from mgpu.parity.live import LiveRun as Runner
from mgpu.parity.masks import Masks
from mgpu.parity.run import CannotRun, State, translate
from mgpu.parity.run import LayerCall as Call
from mgpu.parity.run import StepResult as Record
from mgpu.parity.side import Side

__all__ = ["Call", "CannotRun", "Masks", "Record", "Runner", "Side", "State",
           "translate"]
