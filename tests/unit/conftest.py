"""A busy machine may stop a test for seconds at any point, so hypothesis keeps no time."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
