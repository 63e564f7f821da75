"""The parts of `tools/bench.py`: one file for each thing that a fair comparison needs."""
