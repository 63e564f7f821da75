"""One namespace over directories, S3 buckets and volumes."""
