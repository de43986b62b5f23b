"""The loss of constant predictions: the score of a network that says one class for every image.

    python benchmarks/constant.py --json constant.json     # seconds; reads MNIST and Fashion-MNIST

With the loss ||prediction - onehot|| / ||onehot||, the prediction e_c has sqrt(2 (1 - p_c)), where p_c is the
share of class c among the training images; its accuracy is the share among the test images. So a pair of loss
and accuracy reveals the class.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import stamp, write_json

from ghor_lab.data import DATASETS, load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for name in DATASETS:
        data = load(DATASETS[name])
        train, test = (
            torch.bincount(y, minlength=10) / len(y) for y in (data.train_labels, data.test_labels)
        )
        losses = (2 * (1 - train.double())).sqrt()
        found[name] = [
            {"class": c, "loss": float(loss), "accuracy": 100 * float(right)}
            for c, (loss, right) in enumerate(zip(losses, test, strict=True))
        ]
        for row in found[name]:
            print(
                f"{name:14} always {row['class']:.0f}: loss {row['loss']:.4f}, accuracy "
                f"{row['accuracy']:.2f} %"
            )
    if args.json:
        write_json({"benchmark": "constant", **stamp(), "constant": found}, args.json)


if __name__ == "__main__":
    main()
