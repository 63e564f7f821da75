"""The CSI driver runs the `slicefs` command as a user would. Not begun yet."""
