"""Wrong implementations of mgpu's functions, each rejected by some test.

Each module ``of_*`` has a list ``MUTANTS``; new modules are found.
`planting` defines a mutant, `runner` runs tests against them, `test_mutants`
makes a test of each.
"""
