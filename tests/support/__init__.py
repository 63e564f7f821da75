"""Servers, proxies and waits that all suites use."""
