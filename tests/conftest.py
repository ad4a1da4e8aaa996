"""Shared by all tests: pytester, for the tests of the plugins that kvtier ships."""

pytest_plugins = ["pytester"]
