"""Tests of kvjax; a package: the reference imports as `tests.reference`."""
