"""Pairs of equal networks, drawn at random, and some with one mistake.

A *family* draws the description of a network (`nets`), which each backend can
build, written in one of many ways (`gluon_side`, `torch_side`). `pairs` draws
two ways to write and train one network, which must be equal.

    python -m tests.ports 100
"""
