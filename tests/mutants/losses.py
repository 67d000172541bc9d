"""Losses of other formulas."""
from mutants.planting import Mutant, edit

_LOSS = "mgpu.losses:"
_FORMULA = "oracle/test_loss_values.py::test_losses[1dev-"

MUTANTS = [
    Mutant("l2-without-half", "L2 is torch's MSE",
           edit(_LOSS + "L2Loss._values", " * 0.5", ""),
           (_FORMULA + "7-L2Loss*",)),
    Mutant("sum-instead-of-mean", "the values of one example are added up",
           edit(_LOSS + "Loss._per_example", "ops.mean", "ops.sum"),
           (_FORMULA + "2-*",)),
    Mutant("labels-smoothed", "a tenth of the weight goes to all classes",
           edit(_LOSS + "SoftmaxCrossEntropyLoss._values",
                "ops.nll(pred, label, axis)",
                "0.9 * ops.nll(pred, label, axis) "
                "- 0.1 * ops.mean(pred, axis)"),
           (_FORMULA + "0-*",)),
    Mutant("softmax-over-another-axis", "classes are looked for on the last "
           "axis", edit(_LOSS + "SoftmaxCrossEntropyLoss._values",
                        "ops.log_softmax(pred, axis)",
                        "ops.log_softmax(pred, -1)"),
           (_FORMULA + "3-*",)),
    Mutant("softmax-twice", "log-probabilities are normalised again",
           edit(_LOSS + "KLDivLoss._values", "not self.from_logits", "True"),
           (_FORMULA + "18-*",)),
    Mutant("huber-of-torch", "the slope outside is rho instead of 1",
           edit(_LOSS + "HuberLoss._values",
                "inner * inner / (2.0 * self.rho) + (size - inner)",
                "inner * inner / 2.0 + self.rho * (size - inner)"),
           ("test_losses.py::test_huber_is_smooth_l1_and_not_torchs_huber"
            "[torch]",)),
    Mutant("huber-ignores-rho", "the bend is at 1",
           edit(_LOSS + "HuberLoss._values", "ops.minimum(size, self.rho)",
                "ops.minimum(size, 1.0)"), (_FORMULA + "11-*",)),
    Mutant("kl-averages", "the divergence of an example is divided by the "
           "classes", edit(_LOSS + "KLDivLoss._per_example", "ops.sum",
                           "ops.mean"),
           ("test_losses.py::test_kl_divergence_adds_up_where_others_average"
            "[torch]",)),
    Mutant("pos-weight-for-all", "negative examples are weighted too",
           edit(_LOSS + "SigmoidBinaryCrossEntropyLoss._values",
                "1.0 + label * (pos_weight - 1.0)", "pos_weight"),
           (_FORMULA + "14-*",)),
    Mutant("ctc-skips-between-equals", "two equal labels need no blank",
           edit(_LOSS + "CTCLoss._likelihood", "[~again] = 0", "= 0"),
           ("test_losses.py::test_losses_of_several_arrays_are_gluons_and_"
            "torchs[6-0]",)),
    Mutant("sdml-of-a-shard", "rows meet those of their device only",
           edit(_LOSS + "of_shards", "count < 2", "True"),
           ("test_losses.py::test_a_loss_of_all_rows_is_refused_on_several_"
            "devices*",)),
    Mutant("sample-weights-ignored", "all examples count alike",
           edit(_LOSS + "Loss._weighed", "loss = loss * _as(", "_ = loss * "
                "_as("), (_FORMULA + "1-*",)),
    Mutant("classes-unchecked", "class -1 is taken for another one",
           edit(_LOSS + "check_classes", "labels.min() >= 0 and ", ""),
           ("test_losses.py::test_labels_out_of_range_are_refused[torch-*",)),
    Mutant("classes-truncated", "1.5 is taken for class 1",
           edit(_LOSS + "check_classes", "(labels == np.trunc(labels)).all()",
                "True"),
           ("test_losses.py::test_labels_out_of_range_are_refused[torch-*",)),
    Mutant("per-example-divides", "the mean is spread over the rows",
           edit(_LOSS + "per_example", "mean.reshape((1,))",
                "mean.reshape((1,)) / len(pred)"),
           ("test_losses.py::test_per_example_of_a_function[torch-shape0]",)),
    Mutant("rows-broadcast", "each row meets the labels of its whole shard",
           edit(_LOSS + "_check_paired", "np.isclose(own, turned, rtol=1e-3)",
                "False"),
           ("test_losses.py::test_a_loss_that_broadcasts_rows_is_refused*",)),
    Mutant("weighted-means-pass", "weights of classes and ignored labels are "
           "divided by on each device", edit(_LOSS + "_check_mean",
                                             "if differ:", "if False:"),
           ("test_losses.py::test_per_example_of_what_is_no_mean_over_rows_is_"
            "refused[torch-*",)),
    Mutant("per-example-looks-once", "ignored labels that come later are not "
           "met", edit(_LOSS + "_averages", "count > _FIRST", "count > 1"),
           ("test_losses.py::test_per_example_meets_weights_in_a_later_batch*",
            )),
    Mutant("per-example-calls-again", "a loss that counts is called for parts "
           "too", edit(_LOSS + "_averages", "if pure:", "if True:"),
           ("test_losses.py::test_per_example_calls_what_keeps_something_*",)),
]
