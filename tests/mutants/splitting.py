"""Shards that are not the batch."""
from mutants.planting import Mutant, edit

_BOUNDS = "mgpu.split:shard_bounds"
_TESTS = ("test_split.py::test_bounds",)

MUTANTS = [
    Mutant("rows-lost", "what does not divide is in no shard",
           edit(_BOUNDS, "n // k + (i < n % k)", "n // k"), _TESTS),
    Mutant("rest-on-the-last", "the last shards get the rows left over",
           edit(_BOUNDS, "i < n % k", "i >= k - n % k"), _TESTS),
    Mutant("row-twice", "each shard begins with the last row of the one "
           "before", edit(_BOUNDS, "(end - size, end)",
                          "(max(0, end - size - 1), end)"), _TESTS),
    Mutant("weights-ignored", "unequal devices get equal shards",
           edit(_BOUNDS, "weights is None", "True"),
           ("test_split.py::test_weights",)),
    Mutant("rows-backwards", "the rows of a shard are in another order",
           edit("mgpu.split:_slice", "slice(begin, end),)]",
                "slice(begin, end),)][::-1]"),
           ("test_split.py::test_shards_are_those_of_gluon[torch-2-0-True]",)),
    Mutant("labels-of-other-rows", "labels go to the devices in reverse",
           edit("mgpu.split:split_batch", "y, devices, 0, even_split, "
                "weights)", "y, devices, 0, even_split, weights)[::-1]"),
           ("test_split.py::test_split_batch[torch-2dev]",)),
    Mutant("text-to-all", "a list of text goes to every device",
           edit("mgpu.nested:is_listed", "bool(leaves(data))", "False"),
           ("test_split.py::test_lists_of_text_are_split_by_rows[torch-"
            "2dev]",)),
    Mutant("lists-of-both-meanings", "arrays of rows are cut the other way",
           edit("mgpu.split:check_lists", "len(one) == n > 1", "False"),
           ("test_split.py::test_lists_of_arrays_that_may_be_rows_are_refused"
            "[torch-2dev]",)),
    Mutant("lengths-go-whole", "a tuple of lengths goes to every device",
           edit("mgpu.split:_check_whole", "[len(x)] if", "[] if"),
           ("test_split.py::test_what_goes_whole_and_may_be_of_the_rows_is_"
            "refused[torch-2dev]",)),
    Mutant("objects-go-whole", "arrays in an object go to every device",
           edit("mgpu.split:_check_whole", "else rows_inside(x)", "else []"),
           ("test_split.py::test_what_goes_whole_and_may_be_of_the_rows_is_"
            "refused[torch-2dev]",)),
    Mutant("shards-alias-the-batch", "a change of a shard changes the batch",
           edit("mgpu.split:split_and_load",
                "backend.put(cut(x, batch_axis, begin, end), device)",
                "cut(x, batch_axis, begin, end) if backend.is_native(x) else "
                "backend.put(cut(x, batch_axis, begin, end), device)"),
           ("test_split.py::test_shards_are_copies[torch-2dev-True]",)),
    Mutant("uneven-unasked", "a batch that does not divide is taken",
           edit("mgpu.split:_check_even", "size % k != 0", "False"),
           ("test_split.py::test_shards_are_those_of_gluon[torch-2-0-True]",)),
]
