"""Facts about tensors and memory blocks, remembered as long as those live."""
from typing import Any


class WeakTable:
    """Values by the address of an object that may end at any time.

    A `WeakTensorKeyDictionary` does the same in ten times the time, and each
    training step looks up every parameter.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, Any]] = {}
        self._limit = 1000

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, address: int) -> Any:
        """The value of the object that lives there now, or None."""
        entry = self._entries.get(address)
        # When an object is gone another one may get its address.
        return None if entry is None or entry[0].expired() else entry[1]

    def values(self) -> list[Any]:
        """Those of all objects that live."""
        return [value for reference, value in list(self._entries.values())
                if not reference.expired()]

    def pop(self, address: int) -> Any:
        """As `get`; the table forgets the value."""
        value = self.get(address)
        self._entries.pop(address, None)
        return value

    def put(self, address: int, reference: Any, value: Any) -> None:
        """Remember `value` until ``reference.expired()``."""
        self._entries[address] = reference, value
        if len(self._entries) > self._limit:
            for key, (old, _) in list(self._entries.items()):
                if old.expired():
                    self._entries.pop(key, None)
            self._limit = 1000 + 2 * len(self._entries)
