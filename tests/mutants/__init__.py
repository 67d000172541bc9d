"""Wrong implementations of mgpu's functions, each rejected by some test.

The modules ``of_*`` have a list ``MUTANTS`` each; a new one is found by
itself. `planting` says what a mutant is, `runner` judges them, `test_mutants`
makes a test of each.
"""
