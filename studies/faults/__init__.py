"""Everything that can go wrong in a job of several processes, many times:
``scripts/faults.sh``. Its page is docs/reliability.md. tests/faults/ has the
parts that the ordinary tests run too."""
