"""The parts of `tools/demo.py`: what it works on, the volume, the steps and their report."""
