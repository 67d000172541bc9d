"""The table of docs/guide/habits.md: each cell of mgpu's is run on both
backends, and works or raises a documented error."""
import re
from pathlib import Path

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS

if set(BACKENDS) < {"mxnet", "torch"}:
    pytest.skip("they need both backends", allow_module_level=True)

import torch                                        # noqa: E402

mx = mgpu.mxnet_compat()

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "habits.md"
#: names that the page must not lose: each is in some row
WORDS = """
collect_params kvstore update_on_kvstore rescale_grad multi_precision
mx.optimizer mx.lr_scheduler split_and_load ctx= split_data clip_global_norm
waitall save_parameters load_parameters hybridize list_ctx mx.init Mixed Load
NDArrayIter DataBatch CTCLoss HingeLoss SquaredHingeLoss LogisticLoss
TripletLoss PoissonNLLLoss CosineEmbeddingLoss SDMLLoss pos_weight lamb lars
ftml dcasgd sgld groupadagrad lbsgd batch_size torch.optim lr_scheduler nn.init
state_dict load_state_dict parameters named_parameters train eval module
zero_grad Kwargs predict Accuracy TopK Loss F1 Perplexity callbacks
EarlyStopping Checkpoint LearningRateLog EMA accumulate clip_norm save load
""".split()


def rows(text):
    """(ours, backends, meaning) of each row that has a cell of mgpu's."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 4 \
                and re.fullmatch("`[^`]+`", cells[1]):
            found.append((cells[1].strip("`"), cells[2],
                          cells[3].rstrip(" |")))
    return found


TABLE = rows(PAGE.read_text(encoding="utf-8"))


def network(engine):
    if engine == "torch":
        return torch.nn.Sequential(torch.nn.Linear(4, 3))
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(3, in_units=4))
    return net


def space(engine, folder):
    """What the cells may name."""
    net, devices = network(engine), mgpu.list_devices(2)
    replicas = mgpu.initialize(net, devices, "xavier", force_reinit=True)
    X = np.arange(24, dtype="float32").reshape(6, 4) / 24
    y = np.array([0, 1, 2, 0, 1, 2])
    shards, labels = mgpu.split_batch(X, y, devices)
    return {"__name__": "cells", "mgpu": mgpu, "mx": mx, "torch": torch,
            "net": net,
            "new": network(engine), "replicas": replicas, "X": X, "y": y,
            "trainer": mgpu.Trainer(replicas, "sgd"), "devices": devices,
            "loss": mgpu.losses.SoftmaxCrossEntropyLoss(), "shards": shards,
            "batches": [(X, y), (X[:4], y[:4])], "labels": labels,
            "optimizer": torch.optim.SGD(
                net.parameters() if engine == "torch"
                else [torch.nn.Parameter(torch.zeros(1))], 0.1),
            "file": str(folder / "file")}


def run(cell, names):
    """The cell's last expression."""
    *first, last = cell.split("; ")
    for statement in first:
        exec(statement, names)
    return eval(last, names)


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize(("cell", "engines", "meaning"), TABLE,
                         ids=[cell for cell, *_ in TABLE])
def test_a_word_works_or_is_refused_by_name(cell, engines, meaning, engine,
                                            tmp_path):
    with mgpu.using_backend(engine):
        names = space(engine, tmp_path)
        before = names["replicas"].export_numpy()
        refused = "Refused" in meaning
        if refused or engines not in ("both", engine):
            with pytest.raises((TypeError, ValueError, RuntimeError,
                                AttributeError, NotImplementedError)
                               ) as error:
                run(cell, names)
            text = str(error.value)
            assert text
            for word in re.findall("`([^`]+)`", meaning) if refused else ():
                assert word in text
                assert ". " in text and text.endswith("."), text
            after = names["replicas"].export_numpy()
            for name, values in before.items():
                assert np.array_equal(values, after[name])
        else:
            run(cell, names)


def test_each_word_has_a_row():
    """That a row is read at all, too: a cell more or less changes both."""
    text = PAGE.read_text(encoding="utf-8")
    assert [word for word in WORDS if word not in text] == []
    assert len(TABLE) == len(re.findall(r"^\| .* \| .* \|$", text, re.M)) - 3
    assert {engines for _, engines, _ in TABLE} <= {"both", "mxnet", "torch"}
