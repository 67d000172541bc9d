"""A short run of `kill_save.py`."""
from faults import kill_save


def test_kills_while_saving(backend, tmp_path):
    unreadable, _ = kill_save.kills(backend, 5, tmp_path, width=300)
    assert unreadable == 0


def test_mutated_files(backend, tmp_path):
    loaded, crashed, grown = kill_save.mutations(backend, 200, tmp_path)
    assert (loaded, crashed) == (0, 0) and grown <= kill_save.LIMIT
