"""What a mount shows of itself: registry of numbers, Prometheus text, access log, web page."""
