"""Damaged files, and what MXNet makes of them in a process of its own."""
import contextlib
import copy
import hashlib
import json
import os
import random
import struct
import subprocess
import tempfile
import tracemalloc
from pathlib import Path

import forked
from mgpu.gluon_io import CSR, RowSparse, UnreadableParams, load_params

TESTS = Path(__file__).resolve().parents[1]
FILES = TESTS / "files" / "gluon"

#: what a count or a size becomes
_COUNTS = (0, 1, 2, 3, 5, 7, 8, 12, 31, 33, 255, 2 ** 16, 2 ** 31 - 1,
           2 ** 31, 2 ** 32 - 1, 2 ** 32, 2 ** 40, 2 ** 62, 2 ** 63,
           2 ** 64 - 1, 0xF993FAC8, 0xF993FAC9, 0xF993FACA)


@contextlib.contextmanager
def memory_below(limit):
    """Of Python's and NumPy's, in bytes; not what is mapped from files."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes instead of {limit}"


#: what stands in a damaged graph in the place of something else
_TEXTS = ("", "None", "-1", "0", "99999999999999999999", "1e400", "(1,", "()",
          "(0, 0)", "(-3, 2)", "abc", "[1, 2]", "nan", "inf", "{}",
          "(1, 2, 3, 4, 5)", "None, None", "0.5")
_OTHERS = (None, -1, 0, 10 ** 30, 1e308, "x", [], {}, [[]], [0], [0, 0],
           [-1, 0, 0], [10 ** 9, 0, 0], True, [[0, 0, 0]] * 3, float("inf"))


def _places(x, path=()):
    for key in x if isinstance(x, dict) else range(len(x)) \
            if isinstance(x, list) else ():
        yield (*path, key)
        yield from _places(x[key], (*path, key))


def graph_mutation(graph, seed):
    """A graph, as JSON has it, with one or two faults in its structure; the
    same ones for a seed."""
    draw, graph = random.Random(seed), copy.deepcopy(graph)
    for _ in range(draw.choice((1, 1, 2))):
        *path, key = draw.choice([*_places(graph)])
        x = graph
        for step in path:
            x = x[step]
        kind = draw.randrange(4)
        if kind == 0:
            del x[key]
        elif kind == 1 and isinstance(x[key], str):
            x[key] = draw.choice(_TEXTS)
        elif kind == 2 and isinstance(x, list):
            x.insert(key, copy.deepcopy(draw.choice(x)))
        else:
            x[key] = draw.choice(_OTHERS)
    return graph


def mutation(data, seed):
    """`data` with one to three faults, the same ones for a seed."""
    draw = random.Random(seed)
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.randrange(7)
        at = draw.randrange(len(data) + 1)
        # Most of what matters is at a multiple of four.
        at = min(len(data), at // 4 * 4 if draw.random() < 0.6 else at)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = draw.randbytes(draw.choice((1, 4, 8)))
        elif kind == 3:
            del data[at:at + draw.choice((1, 4, 8))]
        elif kind == 4:
            data[at:at + 4] = struct.pack("<I", draw.choice(_COUNTS) % 2**32)
        elif kind == 5:
            data[at:at + 8] = struct.pack("<Q", draw.choice(_COUNTS))
        else:
            end = at + draw.choice((4, 8, 16))
            to = draw.randrange(len(data) + 1)
            data[to:to] = data[at:end]
    return bytes(data)


def mutations(count):
    """(Name of the whole file, bytes) of damaged files of all variants."""
    whole = sorted(FILES.glob("*.params"))
    return [(whole[i % len(whole)].name,
             mutation(whole[i % len(whole)].read_bytes(), i))
            for i in range(count)]


def _print(*arrays):
    return [[x.dtype.name, list(x.shape), hashlib.sha256(
        x.tobytes()).hexdigest()[:16]] for x in arrays]


def summary(found):
    """A text for JSON of what was loaded: names, dtypes, shapes, bits.
    Tuples of arrays may begin with the shape of a sparse one."""
    def one(x):
        if isinstance(x, RowSparse):
            x = x.shape, x.data, x.indices
        elif isinstance(x, CSR):
            x = x.shape, x.data, x.indptr, x.indices
        elif not isinstance(x, tuple):
            x = (x,)
        return ([list(x[0]), *_print(*x[1:])] if isinstance(x[0], tuple)
                else _print(*x))
    return [[name, one(x)] for name, x in found.items()] \
        if isinstance(found, dict) else [one(x) for x in found]


#: reads files whose paths come in lines, and says what is in each
_ORACLE = """
import json, resource, sys
import mgpu
mgpu.set_backend("mxnet")
import mxnet
from gluon_io import mutations, samples
limit = 16 * 2 ** 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for line in sys.stdin:
    try:
        found = mutations.summary(samples.read_by_mxnet(mxnet, line[:-1]))
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).splitlines()[-1:]}"
    print(json.dumps(found), flush=True)
"""


def what_mxnet_loads(paths):
    """A summary for each file; a text where MXNet raises or crashes."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(
        (str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", ""))))
    found = []
    while len(found) < len(paths):
        done = subprocess.run(
            [forked.python(), "-c", _ORACLE], env=environment, text=True,
            input="".join(f"{p}\n" for p in paths[len(found):]),
            capture_output=True, timeout=300)
        lines = done.stdout.splitlines()
        assert lines or done.returncode < 0, done.stderr[-3000:]
        found += [json.loads(line) for line in lines]
        if len(found) < len(paths):
            found.append(f"MXNet ended with {done.returncode}")
    return found


def judge(count):
    """Tries that many. (Number of refused ones, [(name, number, what we
    loaded, what MXNet loads)] of all others, the greatest memory of a
    reading, as a multiple of its file's size plus 16 kB)."""
    refused, read, memory = 0, [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        tracemalloc.start()
        for i, (name, data) in enumerate(mutations(count)):
            Path(path).write_bytes(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                found = load_params(path)
            except UnreadableParams:
                refused += 1
            else:
                read.append((name, i, summary(found)))
                del found
                os.rename(path, f"{path}{i}")
            memory = max(memory, (tracemalloc.get_traced_memory()[1] - before)
                         / (len(data) + 2 ** 14))
        tracemalloc.stop()
        theirs = what_mxnet_loads([f"{path}{i}" for _, i, _ in read])
    # As JSON has it: no tuples.
    return refused, [(name, i, json.loads(json.dumps(ours)), other)
                     for (name, i, ours), other in zip(read, theirs,
                                                       strict=True)], memory
