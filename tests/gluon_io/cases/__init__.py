"""The cases of each operator, in one list."""
from gluon_io.cases import arrays, recurrent, vision, zoo

CASES = {case.key: case for module in (arrays, recurrent, vision, zoo)
         for case in module.CASES}
