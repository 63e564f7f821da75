"""Tests of rate limits: `slicefs qos`, and mounts that divide a limit."""
