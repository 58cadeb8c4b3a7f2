"""Models from their own packages under every strategy: equal to one device, or refused by name.

The packages are those of the extra `zoo`, which `make test-all` installs. Nothing here is skipped
when one is missing: the tests fail. `make test` deselects them and imports none of the packages.
"""
