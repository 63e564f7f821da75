"""SliceFS against the model and against tmpfs: `Meta` alone, the VFS in process, and real mounts.

Start at `conftest` (who is tested), then `test_model`. What only a kernel can show (mmap, two
mounts, capabilities) is in the other tests.
"""
