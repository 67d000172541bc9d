"""The ledger of accepted differences is true."""
import pytest

import divergences


@pytest.mark.parametrize("name", divergences.LEDGER)
def test_the_difference_has_the_expected_size(name):
    entry = divergences.LEDGER[name]
    assert 0 < entry.low <= entry.high
    assert entry.low <= entry.measure() <= entry.high, entry.what


def test_the_document_is_the_ledger():
    assert divergences.DOCUMENT.read_text(encoding="utf-8") \
        == divergences.document(), "run python tests/parity/divergences.py"
