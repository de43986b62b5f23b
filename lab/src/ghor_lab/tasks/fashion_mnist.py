"""The paper's vision transformer on Fashion-MNIST: other images, and nothing else."""

from .. import data
from .mnist import Mnist


class FashionMnist(Mnist):
    """As MNIST."""

    dataset = data.FASHION_MNIST
