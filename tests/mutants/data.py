"""Batches of other rows."""
from mutants.planting import Mutant, edit

_ITER = "mgpu.datasets:BatchIterator."
_ORDER = ("test_datasets.py::test_the_order_depends_only_on_the_seed_and_the_"
          "epoch",)

MUTANTS = [
    Mutant("order-ignores-the-epoch", "every epoch has the same order",
           edit(_ITER + "__iter__", "[self.seed, epoch]", "[self.seed, 0]"),
           _ORDER),
    Mutant("order-ignores-the-seed", "every seed gives the same order",
           edit(_ITER + "__iter__", "[self.seed, epoch]", "[0, epoch]"),
           _ORDER),
    Mutant("short-batch-dropped", "the rows left over are never seen",
           edit(_ITER + "__len__", "rest > 0 and", "False and"),
           ("test_datasets.py::test_length_and_last_batch",)),
    Mutant("labels-not-shuffled", "labels belong to other examples",
           edit(_ITER + "_batches", "self.y[rows]", "self.y[i * "
                "self.batch_size:(i + 1) * self.batch_size]"),
           ("test_datasets.py::test_an_epoch_holds_every_example_once_with_"
            "its_label",)),
    Mutant("corners-aligned", "pictures are resized from corner to corner",
           edit("mgpu.datasets:bilinear",
                "(np.arange(n) + 0.5) * (old / n) - 0.5",
                "np.arange(n) * ((old - 1) / max(1, n - 1))"),
           ("test_datasets.py::test_bilinear_is_its_definition",)),
]
