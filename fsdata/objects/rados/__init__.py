"""The RADOS store: librados through Debian's binding."""
