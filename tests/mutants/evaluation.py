"""Accuracies that are not a count over a count."""
from mutants.planting import Mutant, edit

_ALL = "mgpu.evaluation:evaluate_accuracy_gpus"
_COUNTS = ("test_evaluation.py::test_integer_networks_have_the_exact_count"
           "[torch-2dev]",)

MUTANTS = [
    Mutant("mean-of-means", "a short batch weighs as much as a long one",
           edit(_ALL, "correct += sum(", "correct += 1 / len(X) * sum(",
                "total += sum(", "total += bool("), _COUNTS),
    Mutant("last-batch-dropped", "the last batch is not counted",
           edit(_ALL, "as_pair, as_rounds(data_iter)",
                "as_pair, list(data_iter)[:-1]"), _COUNTS),
    Mutant("first-shard-only", "the shards of the other devices are not "
           "counted", edit(_ALL, "in zip(outputs, y_shards)",
                           "in [*zip(outputs, y_shards)][:1]"), _COUNTS),
    Mutant("evaluates-in-training", "layers train while they are judged",
           edit(_ALL, "training=False", "training=True"),
           ("test_evaluation.py::test_each_device_judges_by_its_own_"
            "statistics[torch]",)),
    Mutant("best-row-per-class", "argmax goes over the rows",
           edit("mgpu.evaluation:accuracy", "argmax(axis=1)",
                "argmax(axis=0)[y_hat.argmax(axis=1)]"),
           ("test_evaluation.py::test_accuracy_counts[torch]",)),
    Mutant("last-class-wins", "of equal scores the last class is taken",
           edit("mgpu.evaluation:accuracy", "y_hat.argmax(axis=1)",
                "y_hat.shape[1] - 1 - y_hat[:, ::-1].argmax(axis=1)"),
           ("test_evaluation.py::test_accuracy_counts[torch]",)),
    Mutant("parts-of-classes", "a label such as 1.5 is a wrong prediction",
           edit("mgpu.evaluation:accuracy", "_parts(y)", "()"),
           ("test_evaluation.py::test_accuracy_refuses_labels_that_are_no_class_"
            "numbers[torch-*",)),
    Mutant("scores-as-class-numbers", "the scores of a single output are "
           "compared with class numbers",
           edit("mgpu.evaluation:accuracy", "_parts(y_hat)", "()"),
           ("test_evaluation.py::test_scores_of_a_single_output_are_no_class_"
            "numbers[torch-*",)),
    Mutant("single-output-trains", "an epoch is trained before its accuracy "
           "is refused", edit("mgpu.training:_checked", "check(output)", "0"),
           ("test_training.py::test_a_network_with_one_output_has_its_own_"
            "measure[torch-*",)),
    Mutant("filling-counts", "rows that fill up the last batch count",
           edit("mgpu.nested:as_pair", "pair_of(batch, batch.pad)",
                "pair_of(batch, 0)"),
           ("test_keyword_inputs.py::test_a_data_iterator_trains_its_rows_"
            "once_in_each_epoch[0]",)),
    Mutant("rolled-rows-cut", "rows of the epoch before are taken for filling",
           edit("mgpu.inputs:Rounds._pairs", 'rolls and', 'False and'),
           ("test_keyword_inputs.py::test_rows_that_roll_over_are_no_"
            "filling",)),
    Mutant("unread-entries", "a misspelt input is left out in silence",
           edit("mgpu.inputs:Choice.check", "if key not in read",
                "if key in ()"),
           ("test_keyword_inputs.py::test_a_dict_that_does_not_fit_is_refused"
            "[torch-batch0-received 'msk', which nobody reads]",)),
    Mutant("sample-not-waited-for", "its error comes up in a later call",
           edit("mgpu.backends._mxnet.network:MXNetNetwork.infer_shapes",
                "_wait(self.run(inputs))", "self.run(inputs)"),
           ("test_evaluation.py::test_an_error_of_mxnet_does_not_come_up_in_a_"
            "later_call[mxnet-nd]",)),
]
