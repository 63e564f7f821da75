"""Clients: `slicefs mount` processes that outlive the driver, and what they are told."""
