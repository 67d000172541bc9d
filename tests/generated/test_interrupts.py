"""Ctrl-C at random moments of a training, in processes of their own."""
import os
import subprocess
from pathlib import Path

import pytest

import forked
from conftest import BACKENDS

ROOT = Path(__file__).resolve().parents[2]

#: weights that are written in two halves
TORN = """
import time
import mgpu
from tests.generated import interrupts

class Torn(interrupts.Training):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        step = self.trainer.step

        def torn(n, *options):
            x = self.replicas.params()[0].list_data()[0]
            with self.replicas.backend.scope(recording=False):
                x[:] = x * 2
                time.sleep(0.1)     # most of a step, on a busy machine too
                x[:] = x / 2
            step(n, *options)
        self.trainer.step = torn

interrupts.Training = Torn
with mgpu.using_backend("{backend}") as backend:
    print(any(interrupts.interrupted(backend, 10, 0)))
"""


def python(*arguments):
    """What a process of its own prints: Ctrl-C may come anywhere in it."""
    done = subprocess.run(
        [forked.python(), "-W", "ignore", *arguments], cwd=ROOT, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True)
    return done.stdout + done.stderr * bool(done.returncode)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_leaves_a_step_whole_or_not_begun(backend):
    """Twenty times; half of them on strict devices."""
    out = python("-m", "tests.generated.interrupts", "--count", "20",
                 "--backend", backend)
    assert out == (f"{backend}: 0 of 10 wrong\n"
                   f"{backend}, strict devices: 0 of 10 wrong\n")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_inconsistent_step_is_seen(backend):
    assert python("-c", TORN.format(backend=backend)) == "True\n"
