"""The tables of docs/guide/habits.md: the case of each row is run on both
backends, and works or raises an error that names what to use."""
import re
from pathlib import Path
from typing import NamedTuple

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


class Row(NamedTuple):
    name: str               # Gluon's or PyTorch's
    ours: str
    backends: str
    meaning: str
    code: str               # the row's case, from the block below the table


def rows(text):
    """The rows of all tables, each with its case."""
    found = []
    for table, block in re.findall(
            r"((?:^\|[^\n]*\n)+)\n```python\n(.*?)```$", text, re.M | re.S):
        cells = [line[2:-2].split(" | ")
                 for line in table.splitlines()[2:]]
        cases = re.findall(r"^# (.*)\n((?:(?!# ).*\n)*)", block, re.M)
        assert [row[0].replace("`", "") for row in cells] == [
            name for name, _ in cases]
        found += [Row(*row, code) for row, (_, code) in zip(
            cells, cases, strict=True)]
    return found


TABLE = rows(PAGE.read_text(encoding="utf-8"))


def network(engine):
    if engine == "torch":
        return torch.nn.Sequential(torch.nn.Linear(4, 3))
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(3, in_units=4))
    return net


def space(engine, folder):
    """What the cases may name."""
    net, devices = network(engine), mgpu.list_devices(2)
    replicas = mgpu.initialize(net, devices, "xavier", force_reinit=True)
    X = np.arange(24, dtype="float32").reshape(6, 4) / 24
    y = np.array([0, 1, 2, 0, 1, 2])
    shards, labels = mgpu.split_batch(X, y, devices)
    return {"__name__": "cases", "mgpu": mgpu, "mx": mx, "torch": torch,
            "net": net,
            "new": network(engine), "replicas": replicas, "X": X, "y": y,
            "trainer": mgpu.Trainer(replicas, "sgd"), "devices": devices,
            "loss": mgpu.losses.SoftmaxCrossEntropyLoss(), "shards": shards,
            "batches": [(X, y), (X[:4], y[:4])], "labels": labels,
            "optimizer": torch.optim.SGD(
                net.parameters() if engine == "torch"
                else [torch.nn.Parameter(torch.zeros(1))], 0.1),
            "file": str(folder / "file")}


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_a_word_works_or_is_refused_by_name(row, engine, tmp_path):
    with mgpu.using_backend(engine):
        names = space(engine, tmp_path)
        before = names["replicas"].export_numpy()
        refused = row.ours == "raises"
        if refused or row.backends not in ("both", engine):
            with pytest.raises((TypeError, ValueError, RuntimeError,
                                AttributeError, NotImplementedError)
                               ) as error:
                exec(row.code, names)
            text = str(error.value)
            assert text
            for word in re.findall("`([^`]+)`", row.meaning) if refused \
                    else ():
                assert word in text
                assert ". " in text and text.endswith("."), text
            after = names["replicas"].export_numpy()
            for name, values in before.items():
                assert np.array_equal(values, after[name])
        else:
            exec(row.code, names)


def test_each_word_has_a_row():
    """That a row is read at all, too: a cell more or less changes both."""
    text = PAGE.read_text(encoding="utf-8")
    assert [word for word in WORDS if word not in text] == []
    assert len(TABLE) == len(re.findall(r"^\| .* \| .* \|$", text, re.M)) - 3
    assert {row.backends for row in TABLE} <= {"both", "mxnet", "torch"}
    assert all(row.code.strip() for row in TABLE)
    # a row that raises says what to use
    assert all("`" in row.meaning for row in TABLE if row.ours == "raises")
