"""The cases of each operator, in one list."""
from gluon_io.cases import zoo

CASES = {case.key: case for module in (zoo,) for case in module.CASES}
