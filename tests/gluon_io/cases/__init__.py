"""The cases of each operator, in one list."""
from gluon_io.cases import vision, zoo

CASES = {case.key: case for module in (vision, zoo) for case in module.CASES}
