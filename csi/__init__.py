"""The CSI driver: SliceFS in Kubernetes. It runs the `slicefs` command as a user would."""
