"""Base class of wrappers around a network."""
import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any


class Wrapper:
    """Wrapper that delegates attributes and items to `module`.

    Attributes
    ----------
    module : nn.Module or Block
    """

    module: Any
    _remake: Callable[[Any], Any]       # wraps another network

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.module[index] = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def __reduce__(self) -> Any:
        return self._remake, (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._remake(copy.deepcopy(self.module, memo))


def delegate(cls: type, base: type, names: Iterable[str]) -> None:
    """Delegate the methods `names` of `base` to the wrapped network in `cls`.
    A method that returns the network returns the wrapper instead."""
    def delegated(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(base, name))
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = getattr(self.module, name)(*args, **kwargs)
            return self if found is self.module else found
        return method
    for name in names:
        if hasattr(base, name):
            setattr(cls, name, delegated(name))
