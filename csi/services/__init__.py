"""The services of CSI: identity, controller and node."""
