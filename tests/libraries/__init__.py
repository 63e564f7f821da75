"""Libraries of data science on `slicefs://` URLs."""
