"""The paper's numbers, copied from its tables, so that a report can show them beside its own.

Source: Brantner, Generalizing Adam To Manifolds For Efficiently Training Transformers (arXiv:2305.16901), the
tables of outcomes, cost and optimizer state. Hardware: one NVIDIA GeForce RTX 4090, float32, Cayley
retraction. `AUTHORS` is not in the paper: it is one run per configuration on MNIST, with a seed of theirs,
which the authors published with their Julia package.
"""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[float, float]

SEEDS = 10
EPOCHS = {"mnist": 500, "fashion-mnist": 500, "pendulum": 1000}


@dataclass(frozen=True)
class Outcome:
    """Mean and sample deviation over the seeds; for the drift smallest and largest; accuracy in percent."""

    final: Pair
    best: Pair
    accuracy: Pair | None = None
    drift: Pair | None = None
    minutes: Pair | None = None  # of one run


@dataclass(frozen=True)
class Cost:
    """Milliseconds per step, seconds per epoch, GiB of device memory."""

    ad: float
    direction: float
    retraction: float
    other: float
    share: float  # percent
    seconds: float
    peak: float

    @property
    def step(self) -> float:
        """The optimizer's part."""
        return self.direction + self.retraction


@dataclass(frozen=True)
class State:
    """Entries of the optimizer state, and MiB in float32."""

    per_weight: int
    total: int
    mib: float


@dataclass(frozen=True)
class Curve:
    """Values at some epochs, by optimizer."""

    epochs: tuple[int, ...]
    values: dict[str, tuple[float, ...]]


OUTCOMES = {
    "mnist": {
        "geometric-adam": Outcome((0.240, 0.014), (0.226, 0.009), (86.02, 0.57), (8.5e-3, 9.0e-3)),
        "scalar-moment-adam": Outcome((0.344, 0.010), (0.340, 0.011), (76.20, 0.75), (3.9e-4, 8.4e-4)),
        "momentum": Outcome((0.705, 0.015), (0.705, 0.015), (62.73, 1.77), (3.4e-4, 4.8e-4)),
        "gradient": Outcome((0.738, 0.015), (0.738, 0.015), (59.11, 1.88), (2.9e-4, 5.5e-4)),
        "standard-adam": Outcome((1.337, 0.005), (1.299, 0.040), (10.69, 0.73)),
    },
    "fashion-mnist": {
        "geometric-adam": Outcome((0.313, 0.012), (0.299, 0.003), (78.66, 0.51), (8.6e-3, 8.9e-3)),
        "scalar-moment-adam": Outcome((0.354, 0.008), (0.351, 0.008), (75.35, 0.62), (2.6e-4, 3.9e-4)),
        "momentum": Outcome((0.654, 0.034), (0.653, 0.034), (67.43, 3.63), (2.4e-4, 6.8e-4)),
        "gradient": Outcome((0.714, 0.038), (0.713, 0.039), (60.98, 4.66), (2.6e-4, 8.8e-4)),
        "standard-adam": Outcome((1.342, 0.000), (1.325, 0.028), (10.00, 0.00)),
    },
    "pendulum": {
        "geometric-adam": Outcome((0.292, 0.055), (0.281, 0.059), minutes=(17.84, 0.05)),
        "scalar-moment-adam": Outcome((0.394, 0.072), (0.289, 0.050), minutes=(17.91, 0.05)),
        "momentum": Outcome((0.405, 0.057), (0.393, 0.061), minutes=(13.63, 0.06)),
        "gradient": Outcome((0.495, 0.009), (0.488, 0.007), minutes=(12.42, 0.06)),
    },
}

COSTS = {
    "mnist": {
        "geometric-adam": Cost(118.4, 4.85, 20.83, 120.4, 17.8, 7.67, 21.8),
        "scalar-moment-adam": Cost(115.8, 5.33, 36.15, 44.9, 25.8, 5.63, 22.2),
        "momentum": Cost(121.5, 4.33, 41.39, 126.6, 25.6, 7.91, 23.5),
        "gradient": Cost(131.2, 5.37, 32.95, 136.3, 22.5, 8.73, 23.4),
        "standard-adam": Cost(119.7, 9.26, 0.30, 118.4, 7.4, 7.21, 22.6),
    },
    "fashion-mnist": {
        "geometric-adam": Cost(117.0, 4.86, 20.82, 121.7, 18.0, 7.67, 22.2),
        "scalar-moment-adam": Cost(115.2, 4.94, 20.67, 44.3, 18.2, 5.37, 22.2),
        "momentum": Cost(119.6, 4.03, 24.44, 123.5, 19.2, 7.87, 23.5),
        "gradient": Cost(118.6, 5.04, 24.49, 124.8, 19.9, 7.90, 23.4),
        "standard-adam": Cost(119.0, 9.88, 0.30, 119.1, 7.9, 7.22, 22.7),
    },
}

# of the vision transformer: 336 weights on St(7, 49) and 39690 other parameters
STATES = {
    "geometric-adam": State(3031, 1137486, 4.34),
    "scalar-moment-adam": State(2717, 1031982, 3.94),
    "momentum": State(2716, 991956, 3.78),
    "gradient": State(2401, 846426, 3.23),
    "standard-adam": State(1029, 464814, 1.77),
}

# by the name that the quantity has in our records
AUTHORS = {
    "loss": Curve(
        (1, 2, 3, 4, 5, 10, 15, 20, 25, 50, 75, 100, 200, 300, 400),
        {
            "geometric-adam": (
                *(0.9895, 0.8569, 0.8254, 0.8105, 0.7962, 0.7383, 0.6655, 0.6053),
                *(0.5657, 0.4840, 0.4334, 0.4033, 0.2983, 0.2662, 0.2317),
            ),
            "standard-adam": (
                *(1.2768, 1.2949, 1.3427, 1.3427, 1.3427, 1.3426, 1.3426, 1.3426),
                *(1.3426, 1.3426, 1.3425, 1.3426, 1.3427, 1.3426, 1.3425),
            ),
            "gradient": (
                *(1.0428, 0.9908, 0.9754, 0.9660, 0.9588, 0.9324, 0.9152, 0.8939),
                *(0.8701, 0.8298, 0.8092, 0.7957, 0.7651, 0.7474, 0.7355),
            ),
            "momentum": (
                *(1.0199, 0.9711, 0.9565, 0.9455, 0.9352, 0.8940, 0.8586, 0.8418),
                *(0.8301, 0.7965, 0.7783, 0.7653, 0.7357, 0.7181, 0.7042),
            ),
        },
    ),
    "test_accuracy": Curve(
        (25, 50, 75, 100, 200, 300, 400, 500),
        {
            "geometric-adam": (75.44, 82.33, 84.72, 86.03, 86.72, 86.49, 86.39, 86.58),
            "standard-adam": (9.8, 9.8, 9.8, 9.8, 9.8, 9.8, 9.8, 9.8),
            "gradient": (37.74, 45.10, 48.75, 50.78, 55.30, 58.00, 59.01, 60.13),
            "momentum": (45.14, 50.45, 53.06, 55.17, 59.05, 61.29, 62.66, 63.92),
        },
    ),
    "drift": Curve(
        (25, 50, 100, 200, 300, 400, 500),
        {
            "geometric-adam": (0.00044, 0.00078, 0.0016, 0.0032, 0.0049, 0.0068, 0.0086),
            "gradient": (2.2e-05, 5.7e-05, 0.0001, 0.00017, 0.00025, 0.00034, 0.00043),
            "momentum": (2.1e-05, 4.6e-05, 8.2e-05, 0.00014, 0.00022, 0.00029, 0.00035),
        },
    ),
}
