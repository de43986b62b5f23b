"""Small runs of both experiments, as configurations, and a way to stop them."""

from runs import SMALL

from ghor_lab.config import Config

PENDULUM = Config("pendulum", "geometric-adam", (0, 1), 2, 1e-3, 5050, compile=False, network=SMALL)
MNIST = Config("mnist", "geometric-adam", (0,), 2, 1e-3, 16, compile=False, network={"blocks": 1})


class Stop(Exception):
    pass


def stop_at(last):
    def report(epoch, line):
        if epoch == last:
            raise Stop

    return report
