"""What holds for every test: examples are drawn the same way on slow and busy machines."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "everywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("everywhere")
