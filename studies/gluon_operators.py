"""Writes mgpu/gluon_io/operators.json: the attributes of MXNet's operators.

    python -m studies.gluon_operators

An exported graph leaves out attributes with default values. MXNet reports the
defaults; the file stores them for machines without MXNet.
"""
import ctypes
import json
import re
from pathlib import Path

import mgpu

FILE = Path(mgpu.__file__).parent / "gluon_io" / "operators.json"
_INPUT = ("NDArray-or-Symbol", "NDArray", "Symbol", "ndarray")


def attributes(name: str) -> dict[str, list[str | None]]:
    """Type and default of each attribute of an operator."""
    described = _as_parsed(name) or _as_documented(name)
    return {key: [_kind(text), _default(text)]
            for key, text in described.items() if not text.startswith(_INPUT)}


def _as_parsed(name: str) -> dict[str, str]:
    """What the operator itself knows; its documentation may be that of
    another one. It says so where it is given an attribute that it has not."""
    import mxnet as mx
    graph = {"nodes": [{"op": "null", "name": "x", "inputs": []},
                       {"op": name, "name": "y", "inputs": [[0, 0, 0]],
                        "attrs": {"no_such_attribute": "1"}}],
             "arg_nodes": [0], "node_row_ptr": [0, 1, 2],
             "heads": [[1, 0, 0]], "attrs": {"mxnet_version": ["int", 10901]}}
    if "Custom" in name or name in ("_NDArray", "_Native"):
        return {}       # these are Python's
    try:
        mx.sym.load_json(json.dumps(graph))
    except mx.base.MXNetError as error:
        return dict(re.findall(r"^(\w+) : (.*)$", str(error), re.MULTILINE))
    return {}


def _as_documented(name: str) -> dict[str, str]:
    from mxnet.base import _LIB, OpHandle, check_call, py_str
    handle = OpHandle()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    text = [ctypes.c_char_p() for _ in range(4)]
    lists = [ctypes.POINTER(ctypes.c_char_p)() for _ in range(3)]
    count = ctypes.c_uint()
    check_call(_LIB.MXSymbolGetAtomicSymbolInfo(
        handle, *map(ctypes.byref, (text[0], text[1], count, *lists,
                                    text[2], text[3]))))
    return {py_str(lists[0][i]): py_str(lists[1][i])
            for i in range(count.value)}


def _default(described: str) -> str | None:
    default = re.search(r"default=(.*)$", described, re.DOTALL)
    return None if default is None else default[1].strip("'\"")


def _kind(described: str) -> str:
    what = described.partition(",")[0]
    for begin, kind in (("{", "str"), ("Shape", "shape"),
                        ("tuple of <float", "floats"),
                        ("tuple of <double", "floats"),
                        ("tuple of <Shape", "shapes"), ("tuple", "shape"),
                        ("boolean", "bool"), ("int", "int"), ("long", "int"),
                        ("float", "float"), ("real_t", "float"),
                        ("double", "double")):
        if what.startswith(begin):
            return kind
    return "str"


def main() -> None:
    """Write the file."""
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
        count, names = ctypes.c_uint(), ctypes.POINTER(ctypes.c_char_p)()
        mx.base.check_call(mx.base._LIB.MXListAllOpNames(
            ctypes.byref(count), ctypes.byref(names)))
        every = sorted(mx.base.py_str(names[i]) for i in range(count.value))
        found = {name: attributes(name) for name in every
                 if "backward" not in name and not name.startswith("_sg_")}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(own)}"
                       for name, own in found.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(len(found), "operators:", FILE)


if __name__ == "__main__":
    main()
