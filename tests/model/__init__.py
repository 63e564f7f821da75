"""The reference file system of dicts, calibrated against tmpfs, and what drives it.

Start at `ops` (the language), then `model` (the definition of correctness), `drivers` and
`fsdriver` (who else speaks it), `gen` (where operations come from), `compare` (the judge).
"""
