"""Speed: mgpu against what people use now. `python -m benchmarks --help`.

What proves something once is in studies/.
"""
