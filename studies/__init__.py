"""Programs that prove something once. Speed is in benchmarks/.

===============================  ===========================================
`bash studies/parity_full.sh`    whole trainings in lock-step
`python -m studies.departures`   how the book's PyTorch version departs from
                                 its Gluon version
`python -m studies.twins`        published pairs of networks
===============================  ===========================================

Their results are in docs/internals/.
"""
