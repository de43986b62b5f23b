"""The paper's numbers, copied from its tables, so that a report can show them beside its own.

Source: Brantner, Generalizing Adam To Manifolds For Efficiently Training Transformers (arXiv:2305.16901), the
tables of outcomes, cost and optimizer state. Hardware: one NVIDIA GeForce RTX 4090, float32, Cayley
retraction. `AUTHORS` is not in the paper: it is one run per configuration on MNIST, with a seed of theirs,
which the authors published with their Julia package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Pair = tuple[float, float]

SEEDS = 10
EPOCHS = {"mnist": 500, "fashion-mnist": 500, "pendulum": 1000}


class Curve(NamedTuple):
    """Values at some epochs, by optimizer."""

    epochs: tuple[int, ...]
    values: dict[str, tuple[float, ...]]


# final loss, best loss and accuracy in percent, mean and sample deviation; drift, smallest and largest
IMAGES = ("loss", "best", "accuracy", "drift")
MNIST = {
    "geometric-adam": ((0.240, 0.014), (0.226, 0.009), (86.02, 0.57), (8.5e-3, 9.0e-3)),
    "scalar-moment-adam": ((0.344, 0.010), (0.340, 0.011), (76.20, 0.75), (3.9e-4, 8.4e-4)),
    "momentum": ((0.705, 0.015), (0.705, 0.015), (62.73, 1.77), (3.4e-4, 4.8e-4)),
    "gradient": ((0.738, 0.015), (0.738, 0.015), (59.11, 1.88), (2.9e-4, 5.5e-4)),
    "standard-adam": ((1.337, 0.005), (1.299, 0.040), (10.69, 0.73)),
}
FASHION_MNIST = {
    "geometric-adam": ((0.313, 0.012), (0.299, 0.003), (78.66, 0.51), (8.6e-3, 8.9e-3)),
    "scalar-moment-adam": ((0.354, 0.008), (0.351, 0.008), (75.35, 0.62), (2.6e-4, 3.9e-4)),
    "momentum": ((0.654, 0.034), (0.653, 0.034), (67.43, 3.63), (2.4e-4, 6.8e-4)),
    "gradient": ((0.714, 0.038), (0.713, 0.039), (60.98, 4.66), (2.6e-4, 8.8e-4)),
    "standard-adam": ((1.342, 0.000), (1.325, 0.028), (10.00, 0.00)),
}
# final error, which is the loss, and best error; minutes of one run, which deviate by 0.05
AUTOENCODER = ("loss", "error", "best", "minutes")
PENDULUM = {
    "geometric-adam": ((0.292, 0.055), (0.281, 0.059), (17.84, 0.0)),
    "scalar-moment-adam": ((0.394, 0.072), (0.289, 0.050), (17.91, 0.0)),
    "momentum": ((0.405, 0.057), (0.393, 0.061), (13.63, 0.0)),
    "gradient": ((0.495, 0.009), (0.488, 0.007), (12.42, 0.0)),
}

# of a step: milliseconds, and percent; seconds of an epoch; GiB of device memory
COSTS = ("ad_ms", "direction", "retraction", "other_ms", "share_percent", "seconds", "peak_gib")
MNIST_COSTS = {
    "geometric-adam": (118.4, 4.85, 20.83, 120.4, 17.8, 7.67, 21.8),
    "scalar-moment-adam": (115.8, 5.33, 36.15, 44.9, 25.8, 5.63, 22.2),
    "momentum": (121.5, 4.33, 41.39, 126.6, 25.6, 7.91, 23.5),
    "gradient": (131.2, 5.37, 32.95, 136.3, 22.5, 8.73, 23.4),
    "standard-adam": (119.7, 9.26, 0.30, 118.4, 7.4, 7.21, 22.6),
}
FASHION_MNIST_COSTS = {
    "geometric-adam": (117.0, 4.86, 20.82, 121.7, 18.0, 7.67, 22.2),
    "scalar-moment-adam": (115.2, 4.94, 20.67, 44.3, 18.2, 5.37, 22.2),
    "momentum": (119.6, 4.03, 24.44, 123.5, 19.2, 7.87, 23.5),
    "gradient": (118.6, 5.04, 24.49, 124.8, 19.9, 7.90, 23.4),
    "standard-adam": (119.0, 9.88, 0.30, 119.1, 7.9, 7.22, 22.7),
}

# entries of the optimizer's state, and MiB in float32: 336 weights on St(7, 49) and 39690 other parameters
STATE = ("state_per_weight", "state_total", "state_mib")
STATES = {
    "geometric-adam": (3031.0, 1137486.0, 4.34),
    "scalar-moment-adam": (2717.0, 1031982.0, 3.94),
    "momentum": (2716.0, 991956.0, 3.78),
    "gradient": (2401.0, 846426.0, 3.23),
    "standard-adam": (1029.0, 464814.0, 1.77),
}


def of_images(
    outcomes: Mapping[str, Sequence[Pair]], costs: Mapping[str, tuple[float, ...]]
) -> dict[str, dict[str, Pair]]:
    """The numbers of the transformer, by optimizer and quantity."""
    found: dict[str, dict[str, Pair]] = {}
    for name, outcome in outcomes.items():
        cost = dict(zip((*COSTS, *STATE), costs[name] + STATES[name], strict=True))
        cost["step_ms"] = cost["direction"] + cost["retraction"]
        found[name] = dict(zip(IMAGES, outcome, strict=False)) | {k: (x, 0.0) for k, x in cost.items()}
    return found


# by experiment, optimizer and quantity; a deviation of 0 is none
REPORTED = {
    "mnist": of_images(MNIST, MNIST_COSTS),
    "fashion-mnist": of_images(FASHION_MNIST, FASHION_MNIST_COSTS),
    "pendulum": {o: dict(zip(AUTOENCODER, (x[0], *x), strict=True)) for o, x in PENDULUM.items()},
}


def reported(experiment: str, optimizer: str, key: str) -> Pair | None:
    """A number of the paper with its deviation (of the drift, the smallest and the largest), or None."""
    return REPORTED.get(experiment, {}).get(optimizer, {}).get(key)


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
