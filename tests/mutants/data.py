"""Batches of other rows."""
from mutants.planting import Mutant, edit

_ITER = "mgpu.datasets:BatchIterator."
_ORDER = ("test_datasets.py::test_the_order_depends_only_on_the_seed_and_the_"
          "epoch",)

MUTANTS = [
    Mutant("order-ignores-the-epoch", "every epoch has the same order",
           edit(_ITER + "_drawn", "[self.seed, epoch]", "[self.seed, 0]"),
           _ORDER),
    Mutant("order-ignores-the-seed", "every seed gives the same order",
           edit(_ITER + "_drawn", "[self.seed, epoch]", "[0, epoch]"),
           _ORDER),
    Mutant("short-batch-dropped", "the rows left over are never seen",
           edit(_ITER + "__len__", "rest > 0 and", "False and"),
           ("test_datasets.py::test_length_and_last_batch",)),
    Mutant("labels-not-shuffled", "labels belong to other examples",
           edit(_ITER + "_made", "self.y[own]", "self.y[:len(own)]"),
           ("test_datasets.py::test_an_epoch_holds_every_example_once_with_"
            "its_label",)),
    Mutant("position-ahead", "batches that a thread draws ahead count as "
           "taken", edit("mgpu.prefetching:Prefetched.__iter__",
                         "source.moves, epoch = False, source",
                         "pass"),
           ("test_datasets.py::test_a_position_of_batches_that_another_"
            "thread_draws_is_refused",)),
    Mutant("position-behind", "the batch in use is drawn again",
           edit("mgpu.datasets:Epoch.taken", "self._number += 1", "pass"),
           ("test_datasets.py::test_a_position_is_after_the_last_batch_that_"
            "was_handed_out",)),
    Mutant("cut-short-is-used", "a batch without a step is not taken again",
           edit("mgpu.checkpoint:_position", "source.stepped",
                "source.position"),
           ("test_checkpoint.py::test_a_batch_that_was_cut_short_comes_again"
            "[torch-1dev-in an epoch]",)),
    Mutant("looked-at-is-unused", "an epoch without a step comes again",
           edit("mgpu.datasets:Epoch.ended",
                "self._data._stepped = self._data._position", "pass"),
           ("test_checkpoint.py::test_batches_without_a_step_come_again_until"
            "_their_epoch_ends[torch]",)),
    Mutant("part-is-left", "Ctrl-C leaves a part of a file",
           edit("mgpu.files:part_of", "os.unlink(part)", "pass"),
           ("test_cli.py::test_ctrl_c_leaves_no_part_of_a_file",)),
    Mutant("download-without-limit", "a file of any size is taken",
           edit("mgpu.datasets:_Limits.update", "raise OSError", "OSError"),
           ("test_datasets.py::test_a_download_is_limited",)),
    Mutant("corners-aligned", "pictures are resized from corner to corner",
           edit("mgpu.datasets:bilinear",
                "(np.arange(n) + 0.5) * (old / n) - 0.5",
                "np.arange(n) * ((old - 1) / max(1, n - 1))"),
           ("test_datasets.py::test_bilinear_is_its_definition",)),
]
