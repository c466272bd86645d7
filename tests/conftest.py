"""For every test: property tests have no deadline, since a busy machine is no defect."""

from hypothesis import settings

settings.register_profile("busy", deadline=None)
settings.load_profile("busy")
