"""The native transport, with and without a kernel."""
