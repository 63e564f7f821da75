"""Tests of fsdata: pure parts, stores, and the whole path of file data."""
