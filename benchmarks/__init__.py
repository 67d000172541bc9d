"""Speed: mgpu against what people use now. `python -m benchmarks --help`.

What proves something once is in studies/.
"""
import contextlib
import json


@contextlib.contextmanager
def started():
    """A list for processes that are started in the block; none outlives
    it."""
    children = []
    try:
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def answer(first, children, seconds=600):
    """What `first`, rank 0 of `children`, prints as JSON, when all have
    ended."""
    out = first.communicate(timeout=seconds)[0]
    if first.returncode:
        raise RuntimeError("rank 0 ended with an error")
    for child in children:
        child.wait(30)
    return json.loads(out)
