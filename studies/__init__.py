"""Programs that prove something once. Speed is in benchmarks/.

===============================  ===========================================
`bash scripts/faults.sh`         what goes wrong in a job of several processes
`bash studies/parity_full.sh`    whole trainings in lock-step
`python -m studies.departures`   how the book's PyTorch version departs from
                                 its Gluon version
`python -m studies.twins`        published pairs of networks
===============================  ===========================================

Their raw results are in studies/results, summaries in docs.
"""
