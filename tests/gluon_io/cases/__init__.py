"""The cases of each operator, in one list."""
from gluon_io.cases import arrays, recurrent, zoo

CASES = {case.key: case for module in (zoo, recurrent, arrays) for case in module.CASES}
