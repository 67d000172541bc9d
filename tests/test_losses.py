"""Losses: Gluon's values and gradients on both backends, against Gluon's own
losses and torch's functions (against formulas in NumPy: tests/oracle)."""
import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import (ENGINES, assert_bit_equal, mlp,
                     relative_difference, using_engine)
from mgpu import cpu
from mgpu.nn import losses
from mgpu.nn.losses import check_per_example, per_example

# float64, formulas of a few operations that differ in the order of rounding
SAME = 1e-13
about_mxnet = pytest.mark.skipif("mxnet" not in BACKENDS,
                                 reason="about MXNet")
about_torch = pytest.mark.skipif("torch" not in BACKENDS,
                                 reason="about torch")


@pytest.fixture
def backend(engine):
    return engine


def value_and_gradient(backend, loss, pred, *others):
    """The values, and the gradient of their sum with respect to `pred`."""
    x = backend.put(pred, cpu(1))
    backend.attach_grad(x)
    others = [y if y is None else backend.put(y, cpu(1)) for y in others]
    with mgpu.record():
        values = loss(x, *others)
    mgpu.backward(values)
    return mgpu.to_numpy(values), mgpu.to_numpy(mgpu.grad(x))


# -- what each is, in NumPy ---------------------------------------------------

def log_softmax(x, axis):
    x = x - x.max(axis=axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=axis, keepdims=True))


RNG = np.random.default_rng(0)
SHAPE = (5, 4, 3)
PRED = RNG.standard_normal(SHAPE) * 2
TARGET = RNG.standard_normal(SHAPE)
UNIT = RNG.uniform(0.1, 0.9, SHAPE)
CLASSES = RNG.integers(0, 3, (5, 4))
CHANNELS = RNG.integers(0, 4, (5, 3))
SIGNS = np.sign(TARGET)
COUNTS = RNG.integers(1, 9, SHAPE).astype(float)
PROBABILITIES = UNIT / UNIT.sum(axis=-1, keepdims=True)


class Case(NamedTuple):
    name: str                   # of the class, here and in Gluon
    pred: np.ndarray
    label: np.ndarray
    options: dict = {}
    gluon_input: dict | None = None      # pos_weight: Gluon's is an input
    torch: Callable[..., Any] | None = None      # (F, pred, label) -> (n,)

    def __repr__(self):
        options = ",".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.name}({options}){self.pred.ndim}d"


def rows(values):
    return values.reshape(len(values), -1).mean(1)


CASES = [
    Case("SoftmaxCrossEntropyLoss", PRED[:, 0], CLASSES[:, 0],
         torch=lambda F, x, y: F.cross_entropy(x, y, reduction="none")),
    Case("SoftmaxCrossEntropyLoss", PRED, CLASSES,
         torch=lambda F, x, y: rows(F.cross_entropy(
             x.transpose(1, 2), y, reduction="none"))),
    Case("SoftmaxCrossEntropyLoss", PRED, CHANNELS, {"axis": 1},
         torch=lambda F, x, y: rows(F.cross_entropy(x, y, reduction="none"))),
    Case("SoftmaxCrossEntropyLoss", PRED, PROBABILITIES,
         {"sparse_label": False},
         torch=lambda F, x, y: rows(F.cross_entropy(
             x.transpose(1, 2), y.transpose(1, 2), reduction="none"))),
    Case("SoftmaxCrossEntropyLoss", PRED, CLASSES,
         {"from_logits": True},
         torch=lambda F, x, y: rows(F.nll_loss(x.transpose(1, 2), y,
                                               reduction="none"))),
    Case("L2Loss", PRED, TARGET,
         torch=lambda F, x, y: rows(F.mse_loss(x, y, reduction="none")) / 2),
    Case("L1Loss", PRED, TARGET,
         torch=lambda F, x, y: rows(F.l1_loss(x, y, reduction="none"))),
    Case("SigmoidBinaryCrossEntropyLoss", PRED, UNIT,
         torch=lambda F, x, y: rows(F.binary_cross_entropy_with_logits(
             x, y, reduction="none"))),
    Case("SigmoidBinaryCrossEntropyLoss", PRED, UNIT, {"pos_weight": 3.5},
         {"pos_weight": 3.5},
         torch=lambda F, x, y: rows(F.binary_cross_entropy_with_logits(
             x, y, reduction="none", pos_weight=x.new_tensor(3.5)))),
    Case("SigmoidBinaryCrossEntropyLoss", UNIT, UNIT[::-1],
         {"from_sigmoid": True},
         # torch bounds the logarithm, Gluon adds 1e-12: 1e-11 apart here.
         torch=lambda F, x, y: rows(F.binary_cross_entropy(
             x, y, reduction="none"))),
    Case("SigmoidBinaryCrossEntropyLoss", UNIT, UNIT[::-1],
         {"from_sigmoid": True, "pos_weight": 0.5}, {"pos_weight": 0.5}),
    *[Case("HuberLoss", PRED, TARGET, {"rho": rho},
           torch=lambda F, x, y, rho=rho: rows(
               F.smooth_l1_loss(x, y, reduction="none", beta=rho)))
      for rho in (1.0, 2.0, 0.3)],
    Case("KLDivLoss", log_softmax(PRED, -1), PROBABILITIES,
         # Gluon adds 1e-12 in the logarithm: 1e-11 apart here.
         torch=lambda F, x, y: F.kl_div(x, y, reduction="none").sum((1, 2))),
    Case("KLDivLoss", PRED, PROBABILITIES,
         {"from_logits": False, "axis": 1}),
    *[Case("HingeLoss", PRED, SIGNS, {"margin": margin},
           torch=lambda F, x, y, margin=margin: rows(F.relu(margin - x * y)))
      for margin in (1.0, 0.3)],
    Case("SquaredHingeLoss", PRED, SIGNS, {"margin": 0.7},
         torch=lambda F, x, y: rows(F.relu(0.7 - x * y) ** 2)),
    Case("LogisticLoss", PRED, SIGNS,
         torch=lambda F, x, y: rows(F.soft_margin_loss(
             x, y, reduction="none"))),
    Case("LogisticLoss", PRED, SIGNS > 0, {"label_format": "binary"}),
    Case("PoissonNLLLoss", PRED, COUNTS,
         torch=lambda F, x, y: rows(F.poisson_nll_loss(
             x, y, reduction="none"))),
    *[Case("PoissonNLLLoss", UNIT * 9, COUNTS,
           {"from_logits": False, "compute_full": full},
           torch=lambda F, x, y, full=full: rows(F.poisson_nll_loss(
               x, y, False, full, reduction="none")))
      for full in (False, True)],
]
#: what Gluon has for legacy arrays only
LEGACY = {"HuberLoss", "KLDivLoss", "HingeLoss", "SquaredHingeLoss",
          "LogisticLoss", "PoissonNLLLoss"}


#: an option of the loss, and weights of the examples
WEIGHTS = [({}, None), ({"weight": 0.3}, RNG.uniform(0.5, 2, (5, 1, 1)))]


# -- against the frameworks' own ----------------------------------------------

def recordable(mx, full):
    """Gluon's PoissonNLLLoss adds its full term in place, which MXNet does
    not record; the term has no gradient."""
    short = mx.gluon.loss.PoissonNLLLoss(full._weight, full._from_logits)

    def both(*arrays):
        with mx.autograd.pause():
            term = full(*arrays) - short(*arrays)
        return short(*arrays) + term
    return both


@about_mxnet
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_mxnet_values_are_those_of_gluon(case):
    """The real `gluon.loss`, in both array families (some are for only
    legacy arrays there)."""
    for engine in ["mxnet-nd", "mxnet-np"][:1 if case.name in LEGACY else 2]:
        with using_engine(engine) as backend:
            for weight, sample in WEIGHTS:
                compare_with_gluon(backend, case, weight, sample)


def compare_with_gluon(backend, case, weight, sample):
    import mxnet as mx
    if sample is not None:
        sample = sample.reshape((5,) + (1,) * (case.pred.ndim - 1))
    theirs = getattr(mx.gluon.loss, case.name)(**weight, **{
        k: v for k, v in case.options.items()
        if k not in (case.gluon_input or {})})
    if case.options.get("compute_full"):
        theirs = recordable(mx, theirs)
    extra = [backend.put(np.array([v]), cpu(1))
             for v in (case.gluon_input or {}).values()]
    expected = value_and_gradient(
        backend, lambda x, y, w: theirs(x, y, w, *extra), case.pred,
        case.label.astype(float), sample)
    made = value_and_gradient(
        backend, getattr(losses, case.name)(**case.options, **weight),
        case.pred, case.label, sample)
    if len(expected[0]) == 1:       # Gluon's mean over the batch
        made = made[0].mean(keepdims=True), made[1] / len(case.pred)
    for ours, gluons in zip(made, expected):
        assert relative_difference(ours, gluons) < SAME


@about_torch
@pytest.mark.parametrize("case", [c for c in CASES if c.torch],
                         ids=repr)
def test_torch_values_are_those_of_torch(case):
    with using_engine("torch") as backend:
        from torch.nn import functional as F
        expected = value_and_gradient(
            backend, lambda x, y: case.torch(F, x, y), case.pred, case.label)
        made = value_and_gradient(
            backend, getattr(losses, case.name)(**case.options), case.pred,
            case.label)
    # 1e-10: where the two guard the logarithm in different ways.
    guarded = case.options.get("from_sigmoid") or case.name == "KLDivLoss"
    for ours, torchs in zip(made, expected):
        assert relative_difference(ours, torchs) < (
            1e-10 if guarded else SAME)


# -- losses of more than two arrays -------------------------------------------

FLAT, NEAR, FAR = (RNG.standard_normal((5, 4)) for _ in range(3))
PAIRED = np.array([1.0, -1, -1, 1, -1])
STEPS = RNG.standard_normal((4, 7, 5)) * 2
SEQUENCES = np.array([[0, 1, 1], [2, -1, -1], [3, 0, -1], [-1, -1, -1]])
STEPS_OF, LENGTHS = np.array([7, 5, 6, 3]), np.array([3, 1, 2, 0])


def torchs_ctc(F, x, label, steps=None, lengths=None):
    n, t, c = x.shape
    steps = x.new_tensor([t] * n) if steps is None else steps
    lengths = (label >= 0).sum(1) if lengths is None else lengths
    return F.ctc_loss(x.log_softmax(2).transpose(0, 1), label.clamp(min=0),
                      steps.long(), lengths.long(), c - 1, "none")


def torchs_sdml(F, x, y, p=0.3):
    n = len(x)
    labels = x.new_full((n, n), p / (n - 1)).fill_diagonal_(1 - p)
    logs = (-((x[:, None] - y) ** 2).sum(2)).log_softmax(1)
    return F.kl_div(logs, labels, reduction="none").sum(1)


#: name, arrays, options, torch's own
SEVERAL = [
    ("TripletLoss", (FLAT, NEAR, FAR), {"margin": 1.5, "weight": 0.5},
     lambda F, x, y, z: 0.5 * F.relu(
         ((y - x) ** 2 - (z - x) ** 2).sum(1) + 1.5)),
    ("TripletLoss", (PRED, TARGET, UNIT), {},
     lambda F, x, y, z: F.relu(
         ((y - x) ** 2 - (z - x) ** 2).sum((1, 2)) + 1)),
    *[("CosineEmbeddingLoss", (FLAT, NEAR, PAIRED), {"margin": margin},
       lambda F, x, y, z, m=margin: F.cosine_embedding_loss(
           x, y, z, m, reduction="none")) for margin in (0.0, 0.2)],
    ("SDMLLoss", (FLAT, NEAR), {}, torchs_sdml),
    ("SDMLLoss", (FLAT, NEAR), {"smoothing_parameter": 0.1},
     lambda F, x, y: torchs_sdml(F, x, y, 0.1)),
    ("CTCLoss", (STEPS, SEQUENCES), {}, torchs_ctc),
    ("CTCLoss", (STEPS, SEQUENCES, STEPS_OF, LENGTHS), {"weight": 0.5},
     lambda F, *arrays: 0.5 * torchs_ctc(F, *arrays)),
    ("CTCLoss", (STEPS.swapaxes(0, 1).copy(), SEQUENCES.T.copy()),
     {"layout": "TNC", "label_layout": "TN"},
     lambda F, x, y: torchs_ctc(F, x.transpose(0, 1), y.T)),
]


@pytest.mark.parametrize(("number", "leaf"), [
    (i, leaf) for i, (name, *_) in enumerate(SEVERAL)
    for leaf in range(1 if name == "CTCLoss" else 2)])
def test_losses_of_several_arrays_are_gluons_and_torchs(number, leaf):
    """Gluon computes some of them in float32 only. On torch, and between the
    backends, in float64. Gradients are those of argument `leaf`."""
    name, arrays, options, torchs = SEVERAL[number]
    found = {}

    def turned(loss):
        return loss if leaf == 0 else lambda y, x, *more: loss(x, y, *more)
    arrays = arrays[leaf::-1] + arrays[leaf + 1:]
    for engine in ENGINES:
        with using_engine(engine) as backend:
            loss = getattr(losses, name)(**options)
            found[engine] = value_and_gradient(backend, turned(loss),
                                               *arrays)
            assert found[engine][0].shape == (4 if name == "CTCLoss" else 5,)
            if engine == "mxnet-nd":    # its own are of legacy arrays
                import mxnet as mx
                single = [x.astype("float32") for x in arrays]
                wanted = value_and_gradient(
                    backend, turned(getattr(mx.gluon.loss, name)(**options)),
                    *single)
                for ours, theirs in zip(found[engine], wanted):
                    assert relative_difference(
                        ours.ravel(), theirs.ravel()) < 1e-5
            if engine == "torch":
                from torch.nn import functional as F
                wanted = value_and_gradient(
                    backend, turned(lambda *given: torchs(F, *given)),
                    *arrays)
                # These two guard with 1e-12 in other ways.
                guarded = name in ("SDMLLoss", "CosineEmbeddingLoss")
                for ours, theirs in zip(found[engine], wanted):
                    assert relative_difference(ours, theirs) \
                        < (1e-10 if guarded else SAME)
    for one, other in itertools.pairwise(found.values()):
        for a, b in zip(one, other):
            assert relative_difference(a, b) < SAME


@pytest.mark.parametrize("factor, from_sigmoid", [
    (3.5, False), (np.float32(3.5), True),
    (RNG.uniform(0.5, 2, (1, 1, 3)), False)], ids=["number", "scalar",
                                                   "array"])
def test_pos_weight_of_a_call_is_gluons(from_sigmoid, factor):
    arrays = UNIT, UNIT[::-1].copy(), RNG.uniform(0.5, 2, (5, 1, 1))
    found = []
    for engine in ENGINES:
        with using_engine(engine) as backend:
            ours = losses.SigmoidBCELoss(from_sigmoid)
            found.append(value_and_gradient(
                backend, lambda *given: ours(*given, factor), *arrays))
            if engine != "torch":
                import mxnet as mx
                theirs = mx.gluon.loss.SigmoidBCELoss(from_sigmoid)
                weight = backend.put(np.ones(1) * factor, cpu(1))
                found.append(value_and_gradient(
                    backend, lambda *given: theirs(*given, weight), *arrays))
    for one, other in itertools.pairwise(found):
        for a, b in zip(one, other):
            assert relative_difference(a, b) < SAME


def test_a_vector_of_zeros_has_a_finite_gradient(backend):
    """A row that ReLU has cut to zeros: the cosine is 0, as Gluon's is."""
    values, gradient = value_and_gradient(
        backend, losses.CosineEmbeddingLoss(), 0 * FLAT, NEAR,
        np.ones(5))
    assert values.tolist() == [1] * 5 and np.isfinite(gradient).all()


def test_half_precision_keeps_sequences(backend):
    whole, half = (value_and_gradient(
        backend, losses.CTCLoss(), STEPS.astype("float16").astype(dtype),
        SEQUENCES) for dtype in ("float32", "float16"))
    assert half[0].dtype == np.float32 and half[1].dtype == np.float16
    assert relative_difference(*(x[0] for x in (half, whole))) < 1e-6
    assert relative_difference(*(x[1] for x in (half, whole))) < 1e-3


# -- numbers of any size and dtype --------------------------------------------

def test_confident_scores_keep_their_small_losses(backend):
    """And do not overflow: log(1 + exp(x)) of large |x|."""
    for dtype, exact in (("float32", 2e-6), ("float64", 1e-14)):
        x = np.array([-80.0, -30.0, -20.5, 20.5, 30.0, 80.0]).astype(dtype)
        right = (x > 0).astype(dtype)
        values, gradient = value_and_gradient(
            backend, losses.SigmoidBCELoss(), x, right)
        expected = np.logaddexp(0, -np.abs(x.astype(float)))
        np.testing.assert_allclose(values, expected, rtol=exact)
        wrong, _ = value_and_gradient(backend, losses.SigmoidBCELoss(), x,
                                      1 - right)
        np.testing.assert_allclose(wrong, np.logaddexp(0, np.abs(
            x.astype(float))), rtol=exact)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name, label", [
    ("SoftmaxCrossEntropyLoss", [0, 1, 1]),
    ("L2Loss", [[0, 1], [1, 1], [0, 0]]),
    ("SigmoidBCELoss", [[0, 1], [1, 1], [0, 0]])])
def test_labels_of_any_dtype(backend, name, label):
    label, loss = np.array(label), getattr(losses, name)()
    for dtype in ("float32", "float64"):
        pred = RNG.standard_normal((3, 2)).astype(dtype)
        same = value_and_gradient(backend, loss, pred, label.astype(dtype))
        for given in ("float16", "float64", "int32", "uint8", "bool"):
            made = value_and_gradient(backend, loss, pred,
                                      label.astype(given))
            for a, b in zip(made, same):
                assert_bit_equal(a, b)
                assert a.dtype == dtype


def test_sample_weights_take_the_dtype_of_pred(backend):
    made, _ = value_and_gradient(
        backend, losses.L1Loss(), np.ones((2, 2), "float32"),
        np.zeros((2, 2), "float32"), np.array([[1], [2]]))
    assert_bit_equal(made, np.float32([1, 2]))


def test_labels_of_another_shape_with_as_many_elements(backend):
    """(n, 1) against (n,), as Gluon reshapes them."""
    flat, _ = value_and_gradient(backend, losses.L2Loss(), PRED[:, 0, 0],
                                 TARGET[:, 0, 0])
    column, _ = value_and_gradient(backend, losses.L2Loss(), PRED[:, 0, :1],
                                   TARGET[:, 0, 0])
    assert_bit_equal(flat, column)
    pair = [value_and_gradient(
        backend, losses.SoftmaxCrossEntropyLoss(), PRED[:, 0], label)
        for label in (CLASSES[:, 0], CLASSES[:, :1])]
    for a, b in zip(*pair):
        assert_bit_equal(a, b)


# -- errors -------------------------------------------------------------------

@pytest.mark.parametrize("label, received, row", [
    ([7, -1, 9], "7", 0), ([-100, 0, 0], "-100", 0),
    ([0.0, np.nan, 1.0], "nan", 1), ([0.0, 1.0, np.inf], "inf", 2),
    ([[0], [1], [5]], "5", 2), ([0.0, 1.5, 1.0], "1.5", 1)])
def test_labels_out_of_range_are_refused(backend, label, received, row):
    """Gluon takes the nearest class and truncates, in silence; torch raises
    (and leaves -100 out)."""
    pred, given = (backend.put(x, cpu(0)) for x in (
        np.zeros((3, 5)), np.array(label)))
    with pytest.raises(ValueError) as refused:
        losses.SoftmaxCrossEntropyLoss()(pred, given)
    assert str(refused.value) == (
        f"labels must be class numbers 0 to 4; received {received} in "
        f"row {row}. Check the data, or give the network as many outputs "
        "as there are classes.")


def test_what_is_not_native_is_refused(backend):
    loss, x = losses.L2Loss(), backend.put(np.zeros((3, 2)), cpu(0))
    y = x
    for arguments, received in (
            ((np.zeros((3, 2)), y), "ndarray"), ((x, [0, 1, 0]), "list"),
            ((x, y, np.ones((3, 1))), "ndarray"), ((x, y, 2.0), "float")):
        with pytest.raises(TypeError, match=(
                f"a loss takes arrays of the {backend.name} backend; received "
                f"{received}. Use mgpu.put")):
            loss(*arguments)


CE = "SoftmaxCrossEntropyLoss"
#: a loss, its options, the shapes of its arguments, and what is said of them
UNFIT = [
    *[(name, {}, shapes, "equally many examples and elements; received shape "
       "{1} where {0} is")
      for name, *shapes in (("L2Loss", (3, 2), (2, 3)), ("L2Loss", (), ()),
                            ("KLDivLoss", (2,), (3,)),
                            ("HingeLoss", (3,), (3, 2)),
                            ("PoissonNLLLoss", (3, 2, 1), (3, 3)),
                            ("TripletLoss", (3, 2), (2, 3), (3, 2)))],
    *[(CE, {"axis": axis}, shapes, f"expected class numbers of shape {wanted} "
       "for pred of shape {}; received {}.")
      for axis, wanted, *shapes in ((-1, (3,), (3, 2), (4,)),
                                    (-1, (3, 2), (3, 2, 4), (3,)),
                                    (1, (3, 4), (3, 2, 4), (3, 2)))],
    *[(CE, {"axis": axis}, (shape, (3,)), "unknown axis behind that")
      for shape, axis in (((3, 3), 0), ((3, 3), -2), ((3, 3), 2),
                          ((3,), -1))],
    # (n,) against (n, 1) would give n * n values
    *[(name, {}, ((3, 3), (3,) if name == CE else (3, 3), given),
       f"sample_weight must broadcast to the shape {wanted}; received shape "
       "{2}. For one number per example use (3, 1).")
      for name, given, wanted in (
          (CE, (3,), (3, 1)), (CE, (3, 3), (3, 1)), ("L2Loss", (2, 1), (3, 3)),
          ("L1Loss", (1, 3, 3), (3, 3)))]]


def test_shapes_that_do_not_fit_are_refused(backend):
    for name, options, shapes, text in UNFIT:
        arrays = [backend.put(np.zeros(shape), cpu(0)) for shape in shapes]
        with pytest.raises(ValueError) as refused:
            getattr(losses, name)(**options)(*arrays)
        assert text.format(*shapes) in str(refused.value)


@pytest.mark.parametrize("name, arrays, text", [
    ("CTCLoss", (STEPS, [[0, 1, 4]] * 4), "class numbers 0 to 3; received 4"),
    ("CTCLoss", (STEPS, [[0, -1, 1]] * 4), "-1 ends a label"),
    ("CTCLoss", (STEPS[:, :3], [[0, 1, 1]] * 4), "1 steps too few in row 0"),
    ("CTCLoss", (STEPS, SEQUENCES, STEPS_OF, [3, 1, 2, 4]),
     "label_lengths has a whole number from 0 to 3"),
    ("CTCLoss", (STEPS, SEQUENCES.T), "layout NTC and labels of layout NT"),
    ("TripletLoss", (FLAT, NEAR), "takes pred, positive, negative"),
    ("CosineEmbeddingLoss", (FLAT, NEAR, [0, 1, 1, 0, 1]),
     "1 or -1; received 0"),
    ("CosineEmbeddingLoss", (FLAT, NEAR, np.ones((5, 4))), "equally many"),
    ("SDMLLoss", (FLAT, NEAR[:4]), "equally many"),
    ("SDMLLoss", (FLAT[:1], NEAR[:1]), "received 1 examples"),
    ("SigmoidBCELoss", (FLAT, FLAT, None, np.ones((5, 2))),
     "pos_weight must broadcast")])
def test_what_a_loss_of_several_arrays_refuses(name, arrays, text):
    for engine in ENGINES:
        with using_engine(engine) as backend:
            given = [x if x is None else backend.put(np.asarray(x), cpu(0))
                     for x in arrays]
            with pytest.raises((TypeError, ValueError), match=text):
                getattr(losses, name)()(*given)


def test_a_loss_of_all_rows_on_several_devices(backend):
    """`train_batch` passes it all examples; `parallel` those of each device,
    which raises."""
    def loss(x, y):
        return losses.SDMLLoss()((x, 2 * x), y)
    X, y, found = FLAT.astype("float64"), np.zeros(5), []
    for count in (1, 2):
        devices = [cpu(i) for i in range(count)]
        replicas = mgpu.initialize(mlp(backend, (4, 3)), devices, "xavier",
                                   dtype="float64")
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        mgpu.train_batch(X, y, replicas, loss, trainer)
        found.append(replicas.export_numpy())
    for name, value in found[0].items():
        assert relative_difference(found[1][name], value) < 1e-12
    with pytest.raises(ValueError, match="in one of 2 parts"):
        mgpu.parallel(loss, *mgpu.split_batch(X, y, devices))


def test_sequences_are_trained_alike_on_any_number_of_devices():
    """`y` is a tuple of labels and lengths; both backends."""
    found = []
    for engine in (e for e in ENGINES if e != "mxnet-np"):
        for count in (1, 3):
            with using_engine(engine) as backend:
                net = mlp(backend, (7 * 5, 7 * 5))
                replicas = mgpu.initialize(net, [cpu(i) for i in range(count)],
                                           "xavier", dtype="float64")
                trainer = mgpu.Trainer(replicas, "sgd",
                                       {"learning_rate": 0.1})

                def loss(output, y):
                    return losses.CTCLoss()(output.reshape((-1, 7, 5)), y)
                for y in (SEQUENCES, (SEQUENCES, STEPS_OF, LENGTHS)):
                    values = mgpu.train_batch(STEPS.reshape(4, 35), y,
                                              replicas, loss, trainer)
                found.append([*replicas.export_numpy().values(),
                              np.concatenate([*map(mgpu.to_numpy, values)])])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert relative_difference(a, b) < 1e-12


def test_outputs_of_a_network_as_a_tuple(backend):
    x, y, z, label = (backend.put(a, cpu(0)) for a in (FLAT, NEAR, FAR,
                                                       PAIRED))
    for loss, one_by_one, tuples in (
            (losses.TripletLoss(), (x, y, z), [((x, y, z), label),
                                               (x, (y, z))]),
            (losses.CosineEmbeddingLoss(), (x, y, label),
             [((x, y), label)]),
            (losses.SDMLLoss(), (x, y), [((x, y), label)])):
        for given in tuples:
            assert_bit_equal(*(mgpu.to_numpy(loss(*arrays))
                               for arrays in (one_by_one, given)))
    steps, label, of, long = (backend.put(a, cpu(0)) for a in (
        STEPS, SEQUENCES, STEPS_OF, LENGTHS))
    assert_bit_equal(*(mgpu.to_numpy(losses.CTCLoss()(*given)) for given in (
        (steps, label, of, long), (steps, (label, of, long)))))


# -- adapters -----------------------------------------------------------------

def test_reprs():
    assert repr(losses.L2Loss()) == "L2Loss(weight=1.0)"
    assert repr(losses.HuberLoss(rho=2.0)) == "HuberLoss(rho=2.0)"
    for loss in (losses.SoftmaxCELoss(axis=1, weight=2.0),
                 losses.KLDivLoss(from_logits=False),
                 losses.SigmoidBCELoss(pos_weight=3.0), losses.L1Loss()):
        assert repr(eval(repr(loss), vars(losses))) == repr(loss)


class MeanSquare:
    """A loss object in torch's manner, for both backends."""

    def __init__(self, reduction="mean"):
        self.reduction = reduction

    def __call__(self, pred, label):
        ops, terms = mgpu.get_backend().ops, (pred - label) * (pred - label)
        return {"none": lambda: terms, "sum": lambda: ops.sum(terms),
                "mean": lambda: ops.mean(terms),
                "batchmean": lambda: ops.sum(terms) / len(pred)}[
                    self.reduction]()


def _square(x):
    return x * x


WEIGHTED = {
    "weights": lambda f, x, y: f.mean(_square(x - y) * _square(y))
    / f.mean(_square(y)),
    "root": lambda f, x, y: f.mean(_square(x - y)) ** 0.5,
    "ratio": lambda f, x, y: f.mean(x * y) / f.mean(_square(x)),
    "sum": lambda f, x, y: f.sum(_square(x - y)),
    "difference": lambda f, x, y: _square(f.mean(x) - f.mean(y))}


@pytest.mark.parametrize("kind", WEIGHTED)
def test_per_example_of_what_is_no_mean_over_rows_is_refused(engine, kind):
    """Each number of devices would give the rows other weights."""
    ops = engine.ops
    for rows in (2, 5):
        x, y = (engine.put(RNG.standard_normal((rows, 3)), cpu(0))
                for _ in range(2))
        loss = per_example(lambda pred, label: WEIGHTED[kind](ops, pred,
                                                              label))
        with mgpu.record(), pytest.raises(ValueError, match=(
                "returns the mean over the batch of a value for each row; "
                "received .*<lambda>, which gives .* Return a value for each "
                "example instead: reduction='none'")):
            loss(x, y)


def test_per_example_meets_weights_in_a_later_batch(engine):
    """As ignored labels are, which the first batch may not have."""
    ops = engine.ops
    loss = per_example(lambda pred, label: ops.mean(
        _square(pred) * label) / ops.mean(label))
    x, weights = RNG.standard_normal((5, 3)), np.ones((5, 3))
    for _ in range(4):
        loss(engine.put(x, cpu(0)), engine.put(weights, cpu(0)))
    weights[1] = 0
    with pytest.raises(ValueError, match="a value for each row"):
        loss(engine.put(x, cpu(0)), engine.put(weights, cpu(0)))


def options(cls):
    """The names of the options that need no name in a call."""
    return [p.name for p in inspect.signature(cls).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD]


ALL = [cls for cls in vars(losses).values() if isinstance(cls, type)
       and issubclass(cls, losses.Loss) and cls is not losses.Loss]


@about_mxnet
def test_options_are_in_gluons_order():
    with mgpu.using_backend("mxnet"):
        from mxnet.gluon import loss as theirs
    for cls in ALL:
        assert options(cls) == options(getattr(theirs, cls.__name__)), cls


def test_the_batch_axis_is_0():
    for cls in ALL:
        if "batch_axis" in options(cls):
            for wrong in (1, None):
                with pytest.raises(ValueError, match="batch_axis"):
                    cls(batch_axis=wrong)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_per_example_takes_means_with_their_rounding(engine, dtype):
    """Small losses of large outputs too; NaN and infinity tell nothing."""
    ops = engine.ops
    squares = per_example(lambda pred, label: ops.mean(_square(pred - label)))
    entropy = per_example(lambda pred, label: -ops.mean(
        ops.pick(ops.log_softmax(pred, 1), label)))
    for i in (0, 1, 7, 31, 63):
        x = (np.random.default_rng(i).standard_normal((37, 10)) * i
             ).astype(dtype)
        pred, label = (engine.put(a, cpu(0)) for a in (x, x.argmax(1)))
        entropy(pred, label)
        squares(pred, engine.put(x + x[::-1] / 100, cpu(0)))
    for wrong in (np.nan, np.inf):
        x[3] = wrong
        squares(engine.put(x, cpu(0)), engine.put(x * 2, cpu(0)))


@pytest.mark.parametrize("make", [
    lambda nn: (nn.CrossEntropyLoss(), PRED, CHANNELS),
    lambda nn: (nn.CrossEntropyLoss(label_smoothing=0.1), PRED, CHANNELS),
    lambda nn: (nn.CrossEntropyLoss(reduction="sum"), PRED[:, 0],
                CLASSES[:, 0]),
    lambda nn: (nn.MSELoss(), PRED, TARGET),
    lambda nn: (nn.SmoothL1Loss(beta=2.0), PRED, TARGET),
    lambda nn: (nn.BCEWithLogitsLoss(), PRED, UNIT),
    lambda nn: (nn.KLDivLoss(reduction="batchmean"), log_softmax(PRED, -1),
                PROBABILITIES),
    lambda nn: (nn.functional.cross_entropy, PRED, CHANNELS),
    lambda nn: (nn.functional.mse_loss, PRED, TARGET)])
@about_torch
def test_per_example_of_torchs_losses(make):
    """Values that add up to n times torch's mean (or to its sum), and that
    gradient, however the batch is cut."""
    with using_engine("torch") as backend:
        from torch import nn
        loss, pred, label = make(nn)
        n = 1 if getattr(loss, "reduction", "") == "sum" else len(pred)
        whole, slope = value_and_gradient(backend, loss, pred, label)
        adapted = per_example(loss)
        values, gradient = value_and_gradient(backend, adapted, pred, label)
        check_per_example(values, len(pred))
        assert relative_difference(values.sum(), n * whole) < SAME
        assert relative_difference(gradient, n * slope) < SAME
        parts = [value_and_gradient(backend, adapted, pred[i:j], label[i:j])
                 for i, j in ((0, 2), (2, 5))]
        assert relative_difference(
            sum(v.sum() for v, _ in parts), n * whole) < SAME
        assert relative_difference(
            np.concatenate([g for _, g in parts]), n * slope) < SAME


@about_torch
def test_class_weights_of_torch_are_divided_by_the_rows():
    """The documented difference: torch divides by the sum of weights."""
    pred, label = PRED[:, 0], CLASSES[:, 0]
    with using_engine("torch") as backend:
        import torch
        weights = torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64)
        loss = torch.nn.CrossEntropyLoss(weight=weights)
        values, _ = value_and_gradient(backend, per_example(loss), pred,
                                       label)
        own = -log_softmax(pred, 1)[range(5), label] * weights.numpy()[label]
    assert relative_difference(values, own) < SAME


@pytest.mark.parametrize("engine", [
    # the legacy arrays of MXNet do not broadcast so
    name for name in ENGINES if name != "mxnet-nd"], indirect=True)
@pytest.mark.parametrize("kind", ["object", "sum", "function"])
def test_a_loss_that_broadcasts_rows_is_refused(engine, kind):
    """Each device would compare its rows with the labels of its shard."""
    def mean_square(x, y):
        return mgpu.functional.mean((x - y) * (x - y))
    loss = per_example(mean_square if kind == "function" else MeanSquare(
        "sum" if kind == "sum" else "mean"))
    for pred, label in (((5, 1), (5,)), ((5,), (5, 1)), ((5, 1, 4), (5, 4))):
        x, y = (engine.put(RNG.standard_normal(shape), cpu(0))
                for shape in (pred, label))
        with mgpu.record(), pytest.raises(
                ValueError, match="a pred that broadcasts with its label"
                if kind == "function" else "must return one value per "
                r"example, shape \(5,\), .* received shape \(5, 5"):
            loss(x, y)
        assert loss(x, y.reshape(pred)).shape == pred[:1]


@pytest.mark.parametrize("label", ["float32", "int32"])
def test_per_example_of_a_loss_that_reshapes(engine, label):
    """It pairs the rows itself, whatever the shapes are."""
    def mean_square(x, y):
        difference = x.reshape((len(x),)) \
            - mgpu.functional.astype(y, "float32")
        return mgpu.functional.mean(difference * difference)
    x = np.float32([[1], [2], [4]])
    values, gradient = value_and_gradient(
        engine, per_example(mean_square), x, np.array([0, 1, 2], label))
    assert values.tolist() == [2, 2, 2]
    assert gradient.ravel().tolist() == [2, 2, 4]


def test_axes_behind_the_examples(backend):
    for shape in ((5,), (5, 1), (5, 1, 1), (5, 2), (5, 2, 3)):
        values = backend.put(np.arange(5.0).repeat(
            np.prod(shape) // 5).reshape(shape), cpu(0))
        found = mgpu.to_numpy(check_per_example(values, 5))
        assert found.tolist() == [0, 1, 2, 3, 4]


def test_what_train_batch_demands(backend):
    for values, received in (
            *((backend.put(np.zeros(shape), cpu(0)), f"shape {shape}")
              for shape in ((), (4,), (5, 5), (1, 5), (4, 1), (5, 0))),
            (0.5, "float"), (None, "NoneType")):
        with pytest.raises(ValueError, match="one value per example, shape .5,"
                           f".*received {re.escape(received)}. Use a loss of "
                           "mgpu.losses, or wrap one"):
            check_per_example(values, 5)
