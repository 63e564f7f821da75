"""The Kubernetes cluster that the driver runs in: its API, and pods that clients run in."""
