"""The transport on pyfuse3, a binding of libfuse, where the native session can't run."""
