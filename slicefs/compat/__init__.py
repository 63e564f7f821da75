"""Names of other libraries, for programs that switch: their imports change.

    slicefs.compat.dataflux   for dataflux_pytorch: the GCS connector for PyTorch
    slicefs.compat.s3torch    for s3torchconnector: the Amazon S3 connector for PyTorch

All of them are thin: datasets are those of `slicefs.torch`, files are those of a tree. Where a
bucket is named, any URL of a tree does too.
"""
