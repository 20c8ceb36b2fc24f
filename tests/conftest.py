"""What tests share (the package `virtual`) is imported from this folder."""

from hypothesis import settings

# Other work on the machine makes single examples slow; that is not what the tests are about.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
