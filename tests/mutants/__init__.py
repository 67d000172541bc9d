"""Wrong implementations of mgpu's functions, and the tests that reject them.

Each file of an area (`collectives.py`, `losses.py`, ...) has a list
``MUTANTS``; a new file with such a list is found by itself. `planting.py`
says what a mutant is, `runner.py` judges them, `test_mutants.py` makes a test
of each.
"""
