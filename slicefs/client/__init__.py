"""A volume in this process, without a mount: paths, files, batched reads."""
