"""File locks of a mount: possible holders, requests that wait, and locks that are given up."""
