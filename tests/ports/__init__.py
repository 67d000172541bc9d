"""Ports with one mistake, and pairs of equal networks, drawn at random.

A *family* draws the description of a network (`nets`), which each engine can
build, written in one of many ways (`gluon_side`, `torch_side`). A *mistake*
changes the description, or how it trains, on side `b` only (`mistakes`), and
says which layer and which cause are right. `judge` compares such pairs.

    python -m tests.ports --mistakes --seeds 2 --networks tuned
    python -m tests.ports --mistakes --kind "slope of LeakyReLU" --seeds 3
    python -m tests.ports --equal 100 --json equal.json
"""
