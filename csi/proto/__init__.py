"""The messages of CSI: `csi.proto`, which is ours, and the module generated from it."""
