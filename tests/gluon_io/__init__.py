"""MXNet's files and mgpu's reader of them, against MXNet 1.9.1 itself.

`samples.py` has MXNet write every kind of file, `mutations.py` damages files
and asks a process of MXNet what it makes of them. The files in
tests/files/gluon are for environments without MXNet.
``python -m tests.gluon_io --mutations 3000`` tries more than the tests do.
"""
