"""States of a `Trainer` in files: resumed training, and errors."""
import json
import pickle
import re

import numpy as np
import pytest

import mgpu
from helpers import ENGINES, mlp, on, using_engine
from steps import (ROWS, assert_unchanged, initialize, sgd, train, values)

SAVED = [("sgd", {"momentum": 0.5}), ("adam", {}), ("nadam", {}),
         ("ftrl", {}), ("sgd", {})]


@pytest.mark.parametrize("name, options", SAVED, ids=[
    "momentum", "adam", "nadam", "ftrl", "sgd"])
def test_resumed_training_equals_uninterrupted_training(
        devices, tmp_path, name, options):
    """Bit for bit on the same backend and devices, the schedule's position
    and the rate included."""
    def trainer_of(replicas):
        return mgpu.Trainer(
            replicas, name, {"learning_rate": 0.125, **options},
            lr_scheduler=mgpu.lr_scheduler.FactorScheduler(2, 0.5))
    for engine in ENGINES:
        with using_engine(engine) as backend:
            whole = initialize(mlp(backend), devices)
            trainer = trainer_of(whole)
            train(whole, trainer, ROWS[:3])
            trainer.save_states(tmp_path / "states")
            checkpoint = whole.export_numpy()
            train(whole, trainer, ROWS[3:], first=3)
            resumed = mgpu.initialize(mlp(backend), devices, "uniform",
                                      dtype="float64")
            resumed.import_numpy(checkpoint)
            again = trainer_of(resumed)
            again.load_states(str(tmp_path / "states"))
            assert again.num_update == 3
            train(resumed, again, ROWS[3:], first=3)
            assert_unchanged(values(resumed), values(whole))
            assert again.learning_rate == trainer.learning_rate


def test_states_of_a_parameter_that_was_frozen_later(backend, tmp_path):
    """A trainer of Adam that saves and loads its states, one of a parameter
    frozen after the first step, takes the same next step."""
    found = []
    for saves in (False, True):
        replicas = initialize(mlp(backend), on(0))
        trainer = mgpu.Trainer(replicas, "adam")
        for _ in range(2):
            train(replicas, trainer, [4])
            replicas.params()[0].grad_req = "null"
        if saves:
            trainer.save_states(tmp_path / "states")
            trainer.load_states(tmp_path / "states")
        train(replicas, trainer, [4])
        assert trainer.num_update == 3
        found.append(values(replicas))
    assert_unchanged(*found)


class Attack:
    """Unpickling it would leave a mark."""

    marks = []

    def __reduce__(self):
        return (Attack.marks.append, (1,))


def test_a_file_of_another_kind_is_refused_and_nothing_changes(
        backend, tmp_path):
    """No pickle is executed. (Damaged files: test_tensor_files.)"""
    replicas, trainer = sgd(backend, on(0, 1), momentum=0.5)
    train(replicas, trainer)
    before, path = values(replicas), tmp_path / "states"
    header = np.array(json.dumps({"format": "mgpu trainer states 1"}))
    with open(path, "wb") as file:
        np.savez(file, header=header)
    for data in (path.read_bytes(), pickle.dumps(Attack())):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(
                "expected a file of Trainer.save_states (one of Gluon's goes "
                f"to mgpu.resume_from_gluon); {str(path)!r} is not one, or is "
                "damaged (")):
            trainer.load_states(path)
    assert not Attack.marks and trainer.num_update == len(ROWS)
    assert_unchanged(values(replicas), before)


def test_states_of_another_trainer_are_refused(backend, tmp_path):
    """Another optimizer, other shapes, options or parameters: the error names
    each, and the trainer continues."""
    replicas, trainer = sgd(backend, on(0, 1), momentum=0.5)
    train(replicas, trainer)
    trainer.save_states(tmp_path / "states")
    for units, name, options, text in (
            ((6, 5, 3), "adam", {}, "the state of SGD instead of Adam"),
            ((6, 7, 3), "sgd", {"momentum": 0.5},
             "momentum of 0.weight with shape (5, 6) instead of (7, 6)"),
            ((6, 5, 3), "sgd", {}, "unused momentum of 0.weight"),
            ((6, 3), "sgd", {"momentum": 0.5},
             "unknown parameter 2.bias; unknown parameter 2.weight")):
        replicas = initialize(mlp(backend, units), on(0))
        trainer = mgpu.Trainer(replicas, name, {"learning_rate": 0.5,
                                                **options})
        train(replicas, trainer, [4])
        with pytest.raises(ValueError, match="must hold the states of this "
                           f"trainer; received .*{re.escape(text)}"):
            trainer.load_states(tmp_path / "states")
        assert (trainer.num_update, trainer.learning_rate) == (1, 0.5)
        train(replicas, trainer)
    replicas, trainer = sgd(backend, on(0))
    train(replicas, trainer)
    trainer.save_states(tmp_path / "states")
    with pytest.raises(ValueError, match="received no momentum of 0.weight; "
                       "no momentum of 0.bias; .* Load it into a trainer"):
        sgd(backend, on(0), momentum=0.5)[1].load_states(tmp_path / "states")
